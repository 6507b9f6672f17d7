"""Runs the verify and the merge kernel of one variant on a batch, as a launch on a GPU would."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from oracle.batch import verify_batch
from oracle.budget import ErrorBudget, error_budget
from tests.cases import SyntheticBatch
from verify_numba.dims import D_V
from verify_numba.geometry import CLUSTER_FORMS, SINGLE_FORMS, Geometry
from verify_numba.kernels.merge_kernel import MERGE_SHARED_BYTES, MERGE_WARPS, make_merge_kernel
from verify_numba.kernels.verify_kernel import make_verify_kernel
from verify_numba.kernels.work import (
    CHAIN,
    FULL_MASK,
    KV_WIDE,
    MASK_WIDE,
    PREFIX,
    QLEN_ONLY,
    QO_WIDE,
    SLOTS_WIDE,
    TAIL,
)
from verify_numba.lockstep import GlobalMemory, numpy_ops, run_kernel

Array = np.ndarray[Any, np.dtype[Any]]

FORMS = (*CLUSTER_FORMS, *SINGLE_FORMS)
BY_NAME = {g.name: g for g in FORMS}
PARTS = {"ALL": PREFIX | TAIL, "PREFIX": PREFIX, "TAIL": TAIL}
LAYOUTS = {"FULL_MASK": FULL_MASK, "QLEN_ONLY": QLEN_ONLY, "CHAIN": CHAIN}

Change = Callable[[SimpleNamespace], None]


@dataclass(frozen=True, eq=False)
class Result:
    """out [N, H, D_V] bf16 and lse [N, H] float32."""

    out: Array
    lse: Array

    def take(self, tokens: Any) -> Result:
        """The rows of some tokens."""
        return Result(self.out[tokens], self.lse[tokens])

    def same_bits(self, other: Result) -> bool:
        return bool(
            np.array_equal(self.out.view(np.uint16), other.out.view(np.uint16))
            and np.array_equal(self.lse.view(np.uint32), other.lse.view(np.uint32))
        )


def run(
    batch: SyntheticBatch,
    g: Geometry,
    *,
    workers: int = 3,
    min_tiles: int = 1,
    parts: str = "ALL",
    seed: int | None = None,
    adversarial: bool = False,
    check_races: bool = False,
    change: Change = lambda ops: None,
) -> Result:
    """Runs both kernels; scratch and results start out as NaN. `change` may replace operations."""
    N, H, bs = batch.N, batch.H, batch.bs
    out, lse = np.full((N, H, D_V), np.nan, ml_dtypes.bfloat16), np.full((N, H), np.nan, np.float32)
    row_blocks = -(-batch.T * H // g.rows)
    row_capacity = g.rows * row_blocks
    slots = workers + bs
    part_o, part_lse = (np.full((slots, row_capacity, *tail), np.nan, np.float32) for tail in ((D_V,), ()))
    memory = GlobalMemory()
    at = {name: memory.add(name, array) for name, array in locals_of(batch).items()}
    at |= {
        "part_o": memory.add("part_o", part_o),
        "part_lse": memory.add("part_lse", part_lse),
        "out": memory.add("out", out),
        "lse": memory.add("lse", lse),
    }
    ops = numpy_ops(g)
    change(ops)
    widths = index_widths(batch)
    args = (
        at["q"], batch.q.strides[0], batch.q.strides[1], at["k"], batch.k.strides[0],
        at["kv_pool"], batch.kv_pool.strides[0],
        at["qo_indptr"], at["kv_indptr"], at["kv_indices"],
        at.get("custom_mask", 0), at.get("mask_indptr", 0),
        widths, LAYOUTS[batch.mask_layout], PARTS[parts], bs, H, min_tiles, batch.sm_scale * np.log2(np.e),
        at["part_o"], at["part_lse"], at["out"], at["lse"],
    )  # fmt: skip
    launch: dict[str, Any] = {
        "memory": memory,
        "seed": seed,
        "adversarial": adversarial,
        "check_races": check_races,
    }
    run_kernel(
        make_verify_kernel(g, ops),
        (g.cluster * workers, row_blocks), g.cluster, g.threads // 32, g.shared.total, args, **launch,
    )  # fmt: skip
    merge_args = (
        at["qo_indptr"], at["kv_indptr"], widths, PARTS[parts], bs, H, min_tiles, workers, row_capacity,
        at["part_o"], at["part_lse"], at["out"], at["lse"],
    )  # fmt: skip
    grid = (row_capacity // 8 * 16, bs)
    run_kernel(make_merge_kernel(ops), grid, 1, MERGE_WARPS, MERGE_SHARED_BYTES, merge_args, **launch)
    return Result(out, lse)


def locals_of(batch: SyntheticBatch) -> dict[str, Array]:
    """The tensors of a batch by name."""
    names = ("q", "k", "kv_pool", "qo_indptr", "kv_indptr", "kv_indices", "custom_mask", "mask_indptr")
    return {name: getattr(batch, name) for name in names if getattr(batch, name) is not None}


def index_widths(batch: SyntheticBatch) -> int:
    """The bits that say which index arrays are int64."""
    widths = 0
    for name, bit in (
        ("qo_indptr", QO_WIDE),
        ("kv_indptr", KV_WIDE),
        ("kv_indices", SLOTS_WIDE),
        ("mask_indptr", MASK_WIDE),
    ):
        array = getattr(batch, name)
        widths |= bit if array is not None and array.itemsize == 8 else 0
    return widths


def check(batch: SyntheticBatch, result: Result, parts: str = "ALL") -> None:
    """The result is within the error budget of the float64 answer."""
    budget, exact = answer(batch, parts)
    use = budget.use(result.out, result.lse, exact)
    assert use.ok, use


@functools.lru_cache(maxsize=64)
def answer(batch: SyntheticBatch, parts: str) -> tuple[ErrorBudget, tuple[Array, Array]]:
    return error_budget(batch, parts), verify_batch(batch, parts)


def inside(
    g: Geometry,
    body: Callable[[SimpleNamespace], None],
    *,
    memory: GlobalMemory | None = None,
    warps: int = 1,
) -> None:
    """Runs `body(ops)` in every warp of one cluster."""
    ops = numpy_ops(g)
    run_kernel(
        lambda: body(ops),
        (g.cluster, 1), g.cluster, warps, g.shared.total, (),
        memory=memory or GlobalMemory(), check_races=True,
    )  # fmt: skip
