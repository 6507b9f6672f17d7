"""Launches a kernel in lockstep, as a driver would on a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from verify_numba.lockstep.executor import Cluster, Dispatch, Schedule
from verify_numba.lockstep.memory import GlobalMemory


def run_kernel(
    kernel: Callable[..., None],
    grid: tuple[int, int],
    cluster: int,
    warps: int,
    shared_bytes: int,
    args: tuple[Any, ...],
    *,
    memory: GlobalMemory,
    seed: int | None = None,
    adversarial: bool = False,
    check_races: bool = False,
) -> None:
    """Runs `kernel(*args)` in every warp of a grid; returns when all have ended.

    Args:
        kernel: made by a factory from `numpy_ops`.
        grid: blocks in x and in y.
        cluster: blocks of a cluster, neighbours in x. They run side by side; clusters run one after another.
        warps: warps of a block.
        shared_bytes: dynamic shared memory of a block; it starts out as NaN.
        args: integers, floats, and addresses that `memory` gave.
        memory: the arrays that the kernel may reach.
        seed: draws the order of the clusters and of the warps; without it the order is fixed.
        adversarial: lets asynchronous copies land as late as they may, or at any moment if there is a seed.
        check_races: reports accesses to shared memory that no barrier orders, in whatever order they ran.

    Raises:
        ValueError: `grid[0]` is not a multiple of `cluster`.
        LockstepError: a memory fault, a race, a deadlock or a breach of a barrier's rules.
    """
    if cluster < 1 or grid[0] % cluster:
        raise ValueError(f"grid[0] is {grid[0]}, expected a multiple of the cluster size {cluster}")
    dispatch = Dispatch(kernel, args, grid, warps, shared_bytes, memory)
    clusters = [
        [(first + rank, y) for rank in range(cluster)]
        for y in range(grid[1])
        for first in range(0, grid[0], cluster)
    ]
    rng = None if seed is None else random.Random(seed)
    if rng is not None:
        rng.shuffle(clusters)
    schedule = Schedule(rng, adversarial, check_races)
    for blocks in clusters:
        Cluster(dispatch, blocks, schedule).run()
