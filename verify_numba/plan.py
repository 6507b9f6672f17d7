"""The plan of a verify step: variant, grid and workspace from what never changes between steps.

Nothing here depends on lengths: where the key tiles are cut is decided on the device, from the indptrs, so that a
captured graph is right and fast for any lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from verify_numba.dims import D_V
from verify_numba.errors import VerifyInputError
from verify_numba.geometry import CLUSTER_FORMS, MMA_N, SINGLE_FORMS, Geometry
from verify_numba.gpu.spec import CLUSTER_MIN_CC
from verify_numba.kernels.merge_kernel import COLUMN_GROUPS

MAX_H, MAX_T = 128, 64
MIN_TILES = 4
"""Fewest key tiles (16 tokens each) worth a worker of their own: below that, starting a block and merging its part
costs more than the time it saves."""
FIXED_COST = 9
"""A block's time a key tile, in units of one n8 tile of rows: about FIXED_COST + n_tiles. Measured: cluster24,
cluster48 and cluster72 take 35.4, 42.7 and 47.2 us for 65k keys, of which 11.3 are not the tiles'."""


@dataclass(frozen=True)
class VerifyPlan:
    """All integers; `workers` share the key tiles of the batch, each for every row block."""

    max_bs: int
    T: int
    H: int
    geometry: Geometry
    row_blocks: int
    workers: int
    min_tiles: int

    @property
    def form(self) -> str:
        return "cluster" if self.geometry.cluster == 2 else "single"

    @property
    def row_capacity(self) -> int:
        """Query rows of one request, padded to whole blocks."""
        return self.row_blocks * self.geometry.rows

    @property
    def grid(self) -> tuple[int, int]:
        return self.workers * self.geometry.cluster, self.row_blocks

    @property
    def merge_row_tiles(self) -> int:
        return -(-self.T * self.H // MMA_N)

    @property
    def merge_blocks(self) -> int:
        """Blocks of the merge for one request."""
        return self.merge_row_tiles * COLUMN_GROUPS

    @property
    def part_slots(self) -> int:
        """Parts are numbered worker + request: each step to the next request or the next worker takes a new number."""
        return self.workers + self.max_bs

    @property
    def part_o_bytes(self) -> int:
        return self.part_slots * self.row_capacity * D_V * 4

    @property
    def part_lse_bytes(self) -> int:
        return self.part_slots * self.row_capacity * 4

    @property
    def workspace_bytes(self) -> int:
        return self.part_o_bytes + self.part_lse_bytes

    def __str__(self) -> str:
        return (
            f"{self.geometry.name}: {self.workers} workers x {self.row_blocks} row blocks, "
            f"at least {self.min_tiles} tiles a worker, workspace {self.workspace_bytes / 2**20:.1f} MiB"
        )


def make_plan(
    *, max_bs: int, T: int, H: int, cc: tuple[int, int], sm_count: int, nsplit: int | None = None, form: str = "auto",
    lanes_arrive: bool = False,
) -> VerifyPlan:  # fmt: skip
    """The plan for a GPU of compute capability `cc` with `sm_count` multiprocessors.

    nsplit  workers; by default as many as fill the GPU in whole waves
    form    "cluster" (two blocks share each latent row; from compute capability 9.0), "single", or "auto": the cluster
            form where it exists
    lanes_arrive  whether every lane arrives at barriers for itself (see Geometry): for compute-sanitizer's racecheck
    Raises VerifyInputError.
    """
    _check("max_bs", max_bs, 1, 65535)
    _check("T", T, 1, MAX_T)
    _check("H", H, 1, MAX_H)
    if nsplit is not None:
        _check("nsplit", nsplit, 1, 1024)
    if not isinstance(lanes_arrive, bool):
        raise VerifyInputError("lanes_arrive", repr(lanes_arrive), "True or False")
    geometry = min(_forms(form, cc), key=lambda g: _row_blocks(g, T * H) * (FIXED_COST + g.n_tiles))
    geometry = replace(geometry, lanes_arrive=lanes_arrive)
    row_blocks = _row_blocks(geometry, T * H)
    workers = nsplit or _workers(max(1, sm_count // geometry.cluster), row_blocks)
    return VerifyPlan(max_bs, T, H, geometry, row_blocks, workers, min_tiles=1 if nsplit else MIN_TILES)


def _check(field: str, value: int, low: int, high: int) -> None:
    if not (isinstance(value, int) and not isinstance(value, bool) and low <= value <= high):
        raise VerifyInputError(field, repr(value), f"an integer from {low} to {high}")


def _forms(form: str, cc: tuple[int, int]) -> tuple[Geometry, ...]:
    if form not in ("auto", "cluster", "single"):
        raise VerifyInputError("form", repr(form), "'auto', 'cluster' or 'single'")
    if form == "cluster" and cc < CLUSTER_MIN_CC:
        raise VerifyInputError("form", "'cluster'", f"'single' on compute capability {cc[0]}.{cc[1]}")
    return SINGLE_FORMS if form == "single" or cc < CLUSTER_MIN_CC else CLUSTER_FORMS


def _row_blocks(geometry: Geometry, rows: int) -> int:
    return -(-rows // geometry.rows)


def _workers(units: int, row_blocks: int) -> int:
    """The split whose share of the work, times the waves it takes to run, is least; fewer waves where it is close."""

    def cost(workers: int) -> float:
        waves = -(-workers * row_blocks // units)
        return waves / workers * (1 + 0.05 * (waves - 1))

    return min(range(1, units + 1), key=cost)
