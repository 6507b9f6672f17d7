"""The two launches of a verify step on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from verify_numba.batch import VerifyBatch
from verify_numba.binding import Bound
from verify_numba.gpu.kernel import LoadedKernel
from verify_numba.gpu.kernel_set import KernelSet
from verify_numba.gpu.spec import CLUSTER_MIN_CC
from verify_numba.plan import VerifyPlan
from verify_numba.variants import merge_spec, verify_spec
from verify_numba.verifier import LOG2_E

# What torch.cuda.current_device and torch.cuda.current_stream(...).cuda_stream come to, without the objects in between.
# Triton's launcher asks the same way.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda ordinal: torch.cuda.current_stream(ordinal).cuda_stream
)


class GpuExecutor:
    """Holds the workspace and the loaded kernels of one plan."""

    def __init__(self, plan: VerifyPlan, kernels: KernelSet):
        self.plan, self.device, self._kernels = plan, kernels.gpu.ordinal, kernels
        place = torch.device("cuda", self.device)
        self._part_o = torch.empty(plan.part_o_bytes // 4, dtype=torch.float32, device=place)
        self._part_lse = torch.empty(plan.part_lse_bytes // 4, dtype=torch.float32, device=place)
        self._workspace = self._part_o.data_ptr(), self._part_lse.data_ptr()
        self._row_capacity = plan.row_capacity
        self._merge_bs = 0
        self._loaded: tuple[LoadedKernel, LoadedKernel] | None = None

    def warmup(self) -> None:
        if self._loaded is not None:
            return
        stream = torch.cuda.current_stream(self.device).cuda_stream
        verify = self._kernels.load(verify_spec(self.plan.geometry), stream)
        merge = self._kernels.load(merge_spec(overlap=self._kernels.gpu.cc >= CLUSTER_MIN_CC), stream)
        verify.set_grid(*self.plan.grid)
        self._loaded = verify, merge

    def run(self, bound: Bound, parts: int, batch: VerifyBatch, out: Any, lse: Any | None) -> None:
        if self._loaded is None:
            self.warmup()
        if _current_device() != self.device:
            with torch.cuda.device(self.device):
                self._launch(bound, parts)
        else:
            self._launch(bound, parts)

    def _launch(self, bound: Bound, parts: int) -> None:
        assert self._loaded is not None
        (verify, merge), plan = self._loaded, self.plan
        form, (q, k, pool, qo_indptr, kv_indptr, kv_indices, mask, mask_indptr, out, lse), sm_scale = bound
        bs, H, widths, min_tiles = form.bs, plan.H, form.widths, plan.min_tiles
        part_o, part_lse = self._workspace
        verify.bind(
            q, form.q_token_stride, form.q_head_stride, k, form.k_stride, pool, form.pool_stride,
            qo_indptr, kv_indptr, kv_indices, mask, mask_indptr,
            widths, form.mask_layout, parts, bs, H, min_tiles, sm_scale * LOG2_E,
            part_o, part_lse, out, lse,
        )  # fmt: skip
        merge.bind(
            qo_indptr, kv_indptr, widths, parts, bs, H, min_tiles, plan.workers, self._row_capacity,
            part_o, part_lse, out, lse,
        )  # fmt: skip
        if bs != self._merge_bs:
            merge.set_grid(plan.merge_blocks, bs)
            self._merge_bs = bs
        stream = _current_stream(self.device)
        verify.launch(stream)
        merge.launch(stream)

    def poison_workspace(self) -> None:
        self._part_o.fill_(float("nan"))
        self._part_lse.fill_(float("nan"))
