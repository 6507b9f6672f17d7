"""What a benchmark runs on: a pool of latent rows far larger than the L2, disjoint slot sets, a tree mask.

Calls walk over the sets in turn. With COLD_BYTES of rows between two visits to the same set, every latent row is
cold when it is read, as it is in a server where sixty layers lie between two visits.

Set i is set 0 moved by i * shift slots, so that a kernel which fixes its slots beforehand can walk over the sets by
moving the pool's address. No row of one set lies beside a row of another: what a copy fetches ahead is never used.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from harness.bench_shapes import CONTIGUOUS, BenchShape
from harness.errors import UsageError
from verify_numba.dims import D_QK, ROW_BYTES

PAGE = 64
"""Slots of a page for peers that read whole pages; every request's slots are counted in whole pages."""
COLD_BYTES = 400_000_000
MIN_SETS, MAX_SETS = 3, 512
DEFAULT_POOL_SLOTS = 1_200_000
POOL_SHARE = 0.6
"""Largest share of the free memory that the pool may take."""
SM_SCALE = 1 / math.sqrt(192)
FILL_ROWS = 1 << 18
GAP = 2
"""Of so many runs of slots one belongs to a set; the others keep the sets apart."""

Requests = list[Tensor]
"""One int64 tensor a request: the slots of its prefix tokens, then of its T draft tokens."""


@dataclass(frozen=True)
class Coldness:
    """How many bytes lie between two reads of a row, and how few sets are acceptable."""

    bytes: int = COLD_BYTES
    min_sets: int = MIN_SETS

    def sets(self, shape: BenchShape) -> int:
        wanted = -(-self.bytes // (_rows(shape) * ROW_BYTES))
        return min(MAX_SETS, max(self.min_sets, wanted))

    def bytes_between(self, shape: BenchShape) -> int:
        """Bytes of latent rows that pass between two reads of the same row."""
        return self.sets(shape) * _rows(shape) * ROW_BYTES


def pool_slots(shapes: Sequence[BenchShape], cold: Coldness, least: int) -> int:
    """Slots that hold every shape's sets, in whole pages, and at least `least`."""
    return _whole_pages(max(least, *(GAP * cold.sets(s) * (_paged_rows(s) + s.run_length) for s in shapes)))


def check_pool_fits(slots: int, device: torch.device, pools: int) -> None:
    """Raises UsageError when that many pools, one for each contender's process, would crowd the memory."""
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    if pools * slots * ROW_BYTES > POOL_SHARE * free:
        raise UsageError(
            f"{pools} contenders, each with a pool of {slots} slots, take {pools * slots * ROW_BYTES / 1e9:.1f} GB of "
            f"{free / 1e9:.1f} GB free; ask for fewer --peers, fewer or shorter requests, or a smaller --pool-slots"
        )


def make_pool(slots: int, device: torch.device, seed: int) -> Tensor:
    """[slots, 1, D_QK] bf16 standard normal rows; the same seed gives the same pool in every process."""
    pool = torch.empty(slots, 1, D_QK, dtype=torch.bfloat16, device=device)
    fill_pool(pool, seed)
    return pool


def fill_pool(pool: Tensor, seed: int) -> None:
    """Give the pool its first contents again, so that what earlier workloads wrote depends on nothing."""
    generator = torch.Generator(pool.device).manual_seed(seed)
    for rows in pool.split(FILL_ROWS):
        rows.normal_(generator=generator)


class Workload:
    """The tensors of one shape. SGLang's dtypes: int64 slots, int32 indptrs, a bool FULL_MASK.

    `q` [N, H, D_QK] and `k` [N, 1, D_QK] bf16 are shared by all sets; `pool` [slots, 1, D_QK] holds `k` at the
    draft slots of every set, as it does in SGLang when attention runs.
    """

    def __init__(self, shape: BenchShape, pool: Tensor, cold: Coldness, seed: int) -> None:
        self.shape, self.pool, self.device = shape, pool, pool.device
        self.n_sets = cold.sets(shape)
        self.sm_scale = SM_SCALE
        self._generator = torch.Generator(self.device).manual_seed(seed)
        N = shape.bs * shape.T
        self.q = self._normal(N, shape.H)
        self.q[:1] *= 4  # one token with a peaked softmax
        self.k = self._normal(N, 1)
        self.tree = random_trees(shape.bs, shape.T, seed).to(self.device)
        self.qo_indptr = self._indptr([shape.T] * shape.bs)
        self.kv_indptr = self._indptr(shape.lengths)
        self.sets = self._slot_sets()
        for requests in self.sets:
            pool[torch.cat([slots[-shape.T :] for slots in requests])] = self.k

    @property
    def shift(self) -> int:
        """Slots from one set to the next."""
        run = self.shape.run_length
        return _paged_rows(self.shape) if run == CONTIGUOUS else GAP * run

    @cached_property
    def custom_mask(self) -> Tensor:
        """Flat bool FULL_MASK: for each request T rows of L + T cells, prefix cells set."""
        blocks = []
        for b, length in enumerate(self.shape.lengths):
            prefix = torch.ones(self.shape.T, length, dtype=torch.bool, device=self.device)
            blocks.append(torch.cat([prefix, self.tree[b]], dim=1).flatten())
        return torch.cat(blocks)

    @cached_property
    def mask_indptr(self) -> Tensor:
        T = self.shape.T
        return self._indptr([T * (length + T) for length in self.shape.lengths], torch.int64)

    @cached_property
    def kv_indices(self) -> list[Tensor]:
        """For each set the prefix slots of all requests, int64."""
        return [
            torch.cat([slots[: -self.shape.T] for slots in requests]).contiguous() for requests in self.sets
        ]

    @cached_property
    def page_sets(self) -> list[list[Tensor]]:
        """For each set and request the int64 pages that hold L + T rows; random pages unless contiguous."""
        if self.shape.run_length == CONTIGUOUS:
            return [[slots[::PAGE] // PAGE for slots in requests] for requests in self.sets]
        counts = [_whole_pages(length + self.shape.T) // PAGE for length in self.shape.lengths]
        pages = self._permutation(self.pool.shape[0] // PAGE)
        return _cut(pages, counts, self.n_sets)

    def slots_of_pages(self, index: int) -> Requests:
        """The slots that page set `index` covers, request by request, L + T each."""
        offsets = torch.arange(PAGE, device=self.device)
        return [
            (pages[:, None] * PAGE + offsets).flatten()[: length + self.shape.T]
            for pages, length in zip(self.page_sets[index], self.shape.lengths, strict=True)
        ]

    def _slot_sets(self) -> list[Requests]:
        lengths, T = self.shape.lengths, self.shape.T
        sizes = [_whole_pages(length + T) for length in lengths]
        whole = self._first_slots(sum(sizes)).split(sizes)
        first = [slots[: length + T] for slots, length in zip(whole, lengths, strict=True)]
        return [[slots + index * self.shift for slots in first] for index in range(self.n_sets)]

    def _first_slots(self, needed: int) -> Tensor:
        """`needed` distinct slots of set 0, in the order in which tokens take them."""
        run = self.shape.run_length
        if run == CONTIGUOUS:
            return torch.arange(needed, device=self.device)
        stride = self.n_sets * self.shift
        starts = self._permutation(self.pool.shape[0] // stride)[: -(-needed // run)] * stride
        return (starts[:, None] + torch.arange(run, device=self.device)).flatten()[:needed]

    def _permutation(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self._generator, device=self.device)

    def _normal(self, rows: int, heads: int) -> Tensor:
        x = torch.empty(rows, heads, D_QK, dtype=torch.bfloat16, device=self.device)
        return x.normal_(generator=self._generator)

    def _indptr(self, sizes: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        ends = torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0)
        return ends.to(dtype).to(self.device)


def random_trees(bs: int, T: int, seed: int) -> Tensor:
    """[bs, T, T] bool ancestor masks of random trees whose parents come before their children."""
    rng = random.Random(seed)
    mask = torch.zeros(bs, T, T, dtype=torch.bool)
    for b in range(bs):
        for i in range(T):
            if i:
                mask[b, i] = mask[b, rng.randrange(i)]
            mask[b, i, i] = True
    return mask


def _cut(order: Tensor, sizes: Sequence[int], n_sets: int) -> list[Requests]:
    per_set = sum(sizes)
    return [list(part.split(list(sizes))) for part in order[: n_sets * per_set].split(per_set)]


def _rows(shape: BenchShape) -> int:
    return sum(shape.lengths) + shape.bs * shape.T


def _paged_rows(shape: BenchShape) -> int:
    return sum(_whole_pages(length + shape.T) for length in shape.lengths)


def _whole_pages(n: int) -> int:
    return -(-n // PAGE) * PAGE
