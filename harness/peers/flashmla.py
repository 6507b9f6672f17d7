"""FlashMLA's dense decode as packed in sgl_kernel: pages of 64 slots, causal mask only, Hopper only.

Rows of q [bs, T, H, 576] lie token by token and are cut into tiles of 64, as in FlashInfer. Its pages cannot follow
scattered slots, so it reads pages of the same pool in random order: no copy is made, and 64 rows always lie together.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.bench_inputs import PAGE, Workload
from harness.peers.base import CHAIN, Contender, Output, first_line, missing, needs_cuda
from verify_numba.dims import D_QK, D_V

MODULES = ("sgl_kernel.flash_mla", "flash_mla")
"""Where the Python interface is found: SGLang's kernel package, or FlashMLA's own."""

Run = Callable[[Tensor], tuple[Tensor, Tensor]]
"""One call for a block table [bs, pages] int32 -> out [bs, T, H, D_V], lse [bs, H, T]."""


class FlashMLA:
    """Where slots are not contiguous it reads pages of its own, drawn at random from the same pool."""

    name = "flashmla"

    def available(self, device: torch.device) -> str | None:
        try:
            _interface()
        except ImportError as error:
            return missing(" and ".join(MODULES), error)
        return needs_cuda(device) or _wrong_gpu(device)

    def prepare(self, work: Workload) -> Contender:
        tables = [_block_table(pages) for pages in work.page_sets]
        run = _runner(work, tables[0])
        output = Output()
        calls = [_Call(run, table, output) for table in tables]
        return Contender(self.name, calls, output, CHAIN, own_pages=True, note=f"chain mask, pages of {PAGE}")


class _Call:
    def __init__(self, run: Run, table: Tensor, output: Output) -> None:
        self._run, self._table, self._output = run, table, output

    def __call__(self) -> None:
        out, _ = self._run(self._table)
        self._output.out = out.flatten(0, 1)


def _interface() -> Any:
    """The first module that imports. Raises ImportError with the reason of the first."""
    reasons: list[ImportError] = []
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a foreign package may fail in any way; the reason is shown
            reasons.append(ImportError(f"{type(error).__name__}: {first_line(error)}"))
    raise reasons[0]


def _runner(work: Workload, table: Tensor) -> Run:
    """Newer releases schedule inside the first call, older ones from the lengths: the first way that runs."""
    shape = work.shape
    lengths = torch.tensor([n + shape.T for n in shape.lengths], dtype=torch.int32, device=work.device)
    interface = _interface()
    ways: list[Callable[[], tuple[Any, Any]]] = [
        interface.get_mla_metadata,
        lambda: interface.get_mla_metadata(lengths, shape.T * shape.H, 1),
    ]
    try:
        run = _bind(interface, work, lengths, *ways[0]())
        run(table)
    except Exception:  # noqa: BLE001 - whatever it is, the older way either runs or raises what is shown
        run = _bind(interface, work, lengths, *ways[1]())
    return run


def _bind(interface: Any, work: Workload, lengths: Tensor, metadata: Any, splits: Any) -> Run:
    """The metadata serves all calls, as a server makes it once a step for all its layers."""
    shape = work.shape
    q = work.q.view(shape.bs, shape.T, shape.H, D_QK)
    cache = work.pool.view(-1, PAGE, 1, D_QK)

    def run(table: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = interface.flash_mla_with_kvcache(
            *(q, cache, table, lengths, D_V, metadata, splits), softmax_scale=work.sm_scale, causal=True
        )
        return out, lse

    return run


def _block_table(pages: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(pages, batch_first=True).int().contiguous()


def _wrong_gpu(device: torch.device) -> str | None:
    major, minor = torch.cuda.get_device_capability(device)
    if major == 9:
        return None
    return f"its dense decode kernel is written for compute capability 9.0; this GPU has {major}.{minor}"
