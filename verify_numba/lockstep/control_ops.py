"""Where a warp is, and the barriers of a block."""

from __future__ import annotations

from typing import Any

from verify_numba.geometry import PARTNER_BUFFERS, WARP, WEIGHTS_AHEAD, Geometry
from verify_numba.lockstep.barriers import CountedBarrier
from verify_numba.lockstep.machine import current


def place_ops(g: Geometry) -> dict[str, Any]:
    """A warp's place in its launch; and what a GPU does between launches, which has no meaning here."""
    return {
        "device": lambda function: function,
        "warp_id": lambda: current().index,
        "shared_base": lambda: 0,
        "block_x": lambda: current().block.x,
        "row_block": lambda: current().block.y,
        "row_blocks": lambda: current().cluster.dispatch.grid[1],
        "cluster_id": lambda: current().block.x // g.cluster,
        "cluster_count": lambda: current().cluster.dispatch.grid[0] // g.cluster,
        "cluster_rank": lambda: current().block.x % g.cluster,
        "reach": lambda base, rank: 0,
        "release_next": lambda: None,
        "after_previous": lambda: None,
    }


def barrier_rings(g: Geometry) -> dict[str, tuple[int, int, int]]:
    """Each ring of mbarriers by its name in `SharedMap`: first offset, length, arrivals of a phase."""
    at = g.shared
    return {
        "full": (at.full, g.stages, WARP),
        "empty": (at.empty, g.stages, g.value_warps),
        "scores_full": (at.scores_full, PARTNER_BUFFERS, g.score_warps + (g.cluster == 2)),
        "scores_empty": (at.scores_empty, 1, g.softmax_warps),
        "weights_full": (at.weights_full, g.weight_buffers, g.softmax_warps),
        "weights_empty": (at.weights_empty, WEIGHTS_AHEAD, g.value_warps),
        "inverse_full": (at.inverse_full, g.inverse_buffers, g.softmax_warps),
        "inverse_empty": (at.inverse_empty, 1, g.value_warps),
    }


def barrier_ops(g: Geometry) -> dict[str, Any]:
    """Barriers: set up, waited for and arrived at by whole warps."""
    clustered = g.cluster == 2

    def init_barriers(base: int) -> None:
        block = current().block
        for name, (offset, length, count) in barrier_rings(g).items():
            for i in range(length):
                block.init_mbarrier(base + offset + 8 * i, count, f"{name}[{i}]")

    def all_warps() -> CountedBarrier:
        warp = current()
        return warp.cluster.all_warps if clustered else warp.block.all_warps

    def announce() -> None:
        current().arrive(all_warps())

    def await_start() -> None:
        current().sync(all_warps())

    def settle() -> None:
        if clustered:
            current().wait_phase(all_warps(), 0)

    def wait(bar: int, parity: int) -> None:
        current().wait_mbarrier(bar, parity)

    def arrive(bar: int) -> None:
        current().arrive_mbarrier(bar)

    def arrive_expecting(bar: int, nbytes: int) -> None:
        current().arrive_mbarrier(bar, nbytes if clustered else 0)

    return {
        "init_barriers": init_barriers,
        "announce": announce,
        "await_start": await_start,
        "settle": settle,
        "wait": wait,
        "wait_cluster": wait,
        "arrive": arrive,
        "arrive_expecting": arrive_expecting,
    }
