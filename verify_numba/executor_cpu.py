"""The same two kernels in lockstep on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from verify_numba.arrays import host_array
from verify_numba.batch import VerifyBatch
from verify_numba.binding import Bound
from verify_numba.geometry import WARP
from verify_numba.kernels.merge_kernel import MERGE_SHARED_BYTES, MERGE_WARPS, make_merge_kernel
from verify_numba.kernels.verify_kernel import make_verify_kernel
from verify_numba.lockstep.launch import run_kernel
from verify_numba.lockstep.memory import GlobalMemory
from verify_numba.lockstep.ops import numpy_ops
from verify_numba.plan import VerifyPlan
from verify_numba.verifier import LOG2_E

CPU_LIKE: dict[str, Any] = {"cc": (9, 0), "sm_count": 8}
"""What a plan for the CPU supposes: few workers, so that little is computed twice, but enough to split and merge."""


class CpuExecutor:
    """Runs each call to its end. `seed` and `adversarial` as in `run_kernel`."""

    device = -1

    def __init__(self, plan: VerifyPlan, *, seed: int | None = None, adversarial: bool = False):
        self.plan = plan
        self._schedule: dict[str, Any] = {"seed": seed, "adversarial": adversarial}
        self._part_o = np.empty(plan.part_o_bytes // 4, np.float32)
        self._part_lse = np.empty(plan.part_lse_bytes // 4, np.float32)
        ops = numpy_ops(plan.geometry)
        self._verify, self._merge = make_verify_kernel(plan.geometry, ops), make_merge_kernel(ops)

    def warmup(self) -> None:
        """Nothing to compile."""

    def run(self, bound: Bound, parts: int, batch: VerifyBatch, out: Any, lse: Any | None) -> None:
        plan, geometry, memory = self.plan, self.plan.geometry, GlobalMemory()
        form, _, sm_scale = bound

        def at(name: str, array: Any | None) -> int:
            return 0 if array is None else memory.add(name, host_array(array))

        qo_indptr, kv_indptr = at("qo_indptr", batch.qo_indptr), at("kv_indptr", batch.kv_indptr)
        part_o, part_lse = memory.add("part_o", self._part_o), memory.add("part_lse", self._part_lse)
        out_at, lse_at = at("out", out), at("lse", lse)
        run_kernel(
            self._verify, plan.grid, geometry.cluster, geometry.threads // WARP, geometry.shared.total,
            (
                at("q", batch.q), form.q_token_stride, form.q_head_stride, at("k", batch.k), form.k_stride,
                at("kv_pool", batch.kv_pool), form.pool_stride,
                qo_indptr, kv_indptr, at("kv_indices", batch.kv_indices),
                at("custom_mask", batch.custom_mask), at("mask_indptr", batch.mask_indptr),
                form.widths, form.mask_layout, parts, form.bs, plan.H, plan.min_tiles, sm_scale * LOG2_E,
                part_o, part_lse, out_at, lse_at,
            ),
            memory=memory, **self._schedule,
        )  # fmt: skip
        run_kernel(
            self._merge, (plan.merge_blocks, form.bs), 1, MERGE_WARPS, MERGE_SHARED_BYTES,
            (
                qo_indptr, kv_indptr, form.widths, parts, form.bs, plan.H, plan.min_tiles, plan.workers,
                plan.row_capacity, part_o, part_lse, out_at, lse_at,
            ),
            memory=memory, **self._schedule,
        )  # fmt: skip

    def poison_workspace(self) -> None:
        self._part_o.fill(np.nan)
        self._part_lse.fill(np.nan)
