"""Every kernel there is, as specs: what the audit checks and the launcher loads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from verify_numba.geometry import CLUSTER_FORMS, SINGLE_FORMS, Geometry
from verify_numba.gpu.spec import CLUSTER_MIN_CC, KernelSpec
from verify_numba.kernels.merge_kernel import MERGE_SHARED_BYTES, MERGE_WARPS


@functools.cache
def verify_spec(g: Geometry) -> KernelSpec:
    """The verify kernel of one geometry."""

    def build() -> Callable[..., Any]:
        from verify_numba.kernels.verify_kernel import make_verify_kernel
        from verify_numba.ptx import ptx_ops

        return make_verify_kernel(g, ptx_ops(g))

    return KernelSpec(
        name=f"verify_{g.name}", build=build, signature=_verify_signature, threads=g.threads, smem_bytes=g.shared.total,
        cluster=g.cluster, max_registers=g.max_registers,
        min_cc=CLUSTER_MIN_CC if g.cluster == 2 else (8, 0),
    )  # fmt: skip


@functools.cache
def merge_spec(overlap: bool) -> KernelSpec:
    """The merge; with `overlap` it is launched while the verify kernel ends (compute capability 9.0 and newer)."""

    def build() -> Callable[..., Any]:
        from verify_numba.kernels.merge_kernel import make_merge_kernel
        from verify_numba.ptx.merging import merge_ops

        return make_merge_kernel(merge_ops(overlap))

    return KernelSpec(
        name="merge_overlapped" if overlap else "merge", build=build, signature=_merge_signature,
        threads=32 * MERGE_WARPS, smem_bytes=MERGE_SHARED_BYTES, max_registers=128,
        min_cc=CLUSTER_MIN_CC if overlap else (8, 0), pdl=overlap,
    )  # fmt: skip


def all_specs() -> list[KernelSpec]:
    return [*(verify_spec(g) for g in (*CLUSTER_FORMS, *SINGLE_FORMS)), merge_spec(False), merge_spec(True)]


def _verify_signature() -> tuple[Any, ...]:
    from numba import float32, int32, int64

    return (int64,) * 12 + (int32,) * 6 + (float32,) + (int64,) * 4


def _merge_signature() -> tuple[Any, ...]:
    from numba import int32, int64

    return (int64,) * 2 + (int32,) * 7 + (int64,) * 4
