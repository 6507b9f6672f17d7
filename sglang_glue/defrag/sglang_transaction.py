"""Carrying a plan out on SGLang: move the rows, then rename the slots wherever one is named.

Before anything changes the transaction may be refused, without harm. Once rows have moved it goes through to the
end; a failure then is raised, since the pool could no longer be trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_glue.defrag.mover import move_on_gpu, move_on_host, warm_up_gpu
from sglang_glue.defrag.plan import Plan
from sglang_glue.defrag.sglang_allocator import replace_free
from sglang_glue.defrag.sglang_state import Holder, Site, tree_nodes
from sglang_glue.defrag.snapshot import Snapshot


class Refused(Exception):
    """The relocation was not begun; nothing has changed. The message says why."""


class RelocationError(RuntimeError):
    """A relocation went wrong half-way: the content of some rows is not what it was."""


Move = Callable[[Site, Plan], int]


@dataclass(frozen=True)
class Stamp:
    """The allocator's state at the time of a snapshot; any alloc or free makes another."""

    free_list: int
    waiting: int

    @classmethod
    def of(cls, site: Site) -> Stamp:
        allocator = site.allocator
        return cls(allocator.free_pages.data_ptr(), allocator.available_size())


def warm_up(site: Site) -> None:
    """Build and load the mover for the pools' device, so that no relocation waits for a compiler."""
    device = site.kv_pools[0].kv_buffer[0].device
    if device.type != "cpu":
        with torch.cuda.device(device):
            warm_up_gpu(site.pools(), torch.cuda.current_stream(device).cuda_stream)


def move_rows(site: Site, plan: Plan) -> int:
    """Move all layers' rows of a plan, on the pool's device and the current stream; returns the bytes."""
    pools = site.pools()
    device = site.kv_pools[0].kv_buffer[0].device
    if device.type == "cpu":
        return move_on_host(pools, plan)
    with torch.cuda.device(device):
        return move_on_gpu(pools, plan, torch.cuda.current_stream(device).cuda_stream)


def execute(
    site: Site,
    snapshot: Snapshot,
    stamp: Stamp,
    plan: Plan,
    held: list[Holder],
    requests: Iterable[Any],
    batches: Iterable[Any],
    move: Move = move_rows,
) -> int:
    """Carry out a plan made from ``snapshot``; returns the bytes moved.

    ``held`` are the requests with a row, ``requests`` all requests, ``batches`` those that keep slots of their last
    step. Raises Refused if slots were taken or given back since the snapshot, RelocationError if the moved rows do
    not read as before.
    """
    if Stamp.of(site) != stamp:
        raise Refused("slots were allocated or freed while the plan was made")
    before = fingerprint(site, plan.src)
    moved = move(site, plan)
    _rename(site, snapshot, plan, held, requests, batches)
    wrong = (fingerprint(site, plan.dst) != before).nonzero()
    if wrong.numel():
        at = int(wrong[0, 0])
        raise RelocationError(
            f"the row of slot {int(plan.src[at])} changed on its way to slot {int(plan.dst[at])} "
            f"({len(set(wrong[:, 0].tolist()))} of {len(plan)} rows)"
        )
    return moved


def fingerprint(site: Site, slots: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
    """Sums [M, B] of the rows' words in the first and last layer buffer of each pool: cheap, and a lost, doubled or
    overwritten row changes them."""
    sums = []
    for pool in site.kv_pools:
        for buffer in {id(b): b for b in (pool.kv_buffer[0], pool.kv_buffer[-1])}.values():
            index = torch.from_numpy(slots).to(buffer.device)
            words = buffer[index].reshape(len(slots), -1).contiguous().view(torch.int32).to(torch.int64)
            weight = torch.arange(1, words.shape[1] + 1, device=buffer.device)
            sums.append((words * weight).sum(1))
    return torch.stack(sums, 1)


def _rename(
    site: Site,
    snapshot: Snapshot,
    plan: Plan,
    held: list[Holder],
    requests: Iterable[Any],
    batches: Iterable[Any],
) -> None:
    on_host = torch.from_numpy(plan.lookup(snapshot.size))
    table = on_host.to(site.allocator.free_pages.device)
    tables = {str(t.device): t for t in (on_host, table)}
    moved = np.zeros(snapshot.size + 1, bool)
    moved[plan.src] = True
    free = torch.from_numpy(plan.free_after(snapshot.free)).to(site.allocator.free_pages.device)
    replace_free(site.allocator, free)
    for node, unit in zip(tree_nodes(site.tree), snapshot.units, strict=False):
        if moved[unit.slots].any():
            node.value = renamed(node.value, tables)
    _rename_rows(site, held, table)
    for req in requests:
        matched = getattr(req, "prefix_indices", None)
        if torch.is_tensor(matched) and matched.numel():
            req.prefix_indices = renamed(matched, tables)
    for batch in {id(b): b for b in batches if b is not None}.values():
        if torch.is_tensor(batch.out_cache_loc):
            batch.out_cache_loc = renamed(batch.out_cache_loc, tables)


def _rename_rows(site: Site, held: list[Holder], table: torch.Tensor) -> None:
    """Rows of the request table up to the allocated length, over-allocated tails included, in one pass."""
    if not held:
        return
    rows = site.table.req_to_token
    which = torch.tensor([h.row for h in held], device=rows.device)
    width = max(h.allocated for h in held)
    lengths = torch.tensor([h.allocated for h in held], device=rows.device)
    block = rows[which, :width]
    valid = torch.arange(width, device=rows.device)[None] < lengths[:, None]
    rows[which, :width] = torch.where(valid, table[block.long()].to(rows.dtype), block)


def renamed(slots: torch.Tensor, tables: dict[str, torch.Tensor]) -> torch.Tensor:
    """The slots' new names, as a tensor of the same type on the same device."""
    return tables[str(slots.device)][slots.long()].to(slots.dtype)
