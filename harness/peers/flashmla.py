"""FlashMLA's dense decode as packed in sgl_kernel: pages of 64 slots, no tree mask, Hopper only."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.bench_inputs import PAGE, Workload
from harness.peers.base import OPEN, Contender, Output, missing, needs_cuda
from verify_numba.dims import D_QK, D_V

Run = Callable[[Tensor], tuple[Tensor, Tensor]]
"""One call for a block table [bs, pages] int32 -> out [bs, T, H, D_V], lse [bs, H, T]."""


class FlashMLA:
    name = "flashmla"

    def available(self, device: torch.device) -> str | None:
        try:
            importlib.import_module("sgl_kernel.flash_mla")
        except Exception as error:  # noqa: BLE001 - a foreign package may fail in any way; the reason is shown
            return missing("sgl_kernel.flash_mla", error)
        return needs_cuda(device) or _wrong_gpu(device)

    def prepare(self, work: Workload) -> Contender:
        run = _runner(work)
        output = Output()
        calls = [_Call(run, _block_table(pages), output) for pages in work.page_sets]
        return Contender(
            self.name,
            calls,
            output,
            OPEN,
            own_pages=True,
            note=f"no mask, pages of {PAGE}",
        )


class _Call:
    def __init__(self, run: Run, table: Tensor, output: Output) -> None:
        self._run, self._table, self._output = run, table, output

    def __call__(self) -> None:
        out, _ = self._run(self._table)
        self._output.out = out.flatten(0, 1)


def _runner(work: Workload) -> Run:
    """The scheduler's metadata is made once, as a server makes it once a step for all its layers."""
    flash_mla: Any = importlib.import_module("sgl_kernel.flash_mla")
    shape = work.shape
    q = work.q.view(shape.bs, shape.T, shape.H, D_QK)
    cache = work.pool.view(-1, PAGE, 1, D_QK)
    lengths = torch.tensor([n + shape.T for n in shape.lengths], dtype=torch.int32, device=work.device)
    metadata, splits = _metadata(flash_mla, lengths, shape.T * shape.H)

    def run(table: Tensor) -> tuple[Tensor, Tensor]:
        return flash_mla.flash_mla_with_kvcache(
            *(q, cache, table, lengths, D_V, metadata, splits),
            softmax_scale=work.sm_scale,
            causal=False,
        )

    return run


def _metadata(flash_mla: Any, lengths: Tensor, rows: int) -> tuple[Any, Any]:
    """Newer releases fill an object on the first call; older ones compute tensors from the lengths."""
    if hasattr(flash_mla, "FlashMLASchedMeta") and hasattr(torch.ops.sgl_kernel, "dense_decode_fwd"):
        return flash_mla.get_mla_metadata()
    return flash_mla.get_mla_metadata(lengths, rows, 1)


def _block_table(pages: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(pages, batch_first=True).int().contiguous()


def _wrong_gpu(device: torch.device) -> str | None:
    major, minor = torch.cuda.get_device_capability(device)
    if major == 9:
        return None
    return f"its dense decode kernel is written for compute capability 9.0; this GPU has {major}.{minor}"
