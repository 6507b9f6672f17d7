"""Kernels of a few lines for tests of the executor itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from verify_numba.lockstep import GlobalMemory, run_kernel
from verify_numba.lockstep.machine import Warp, current

BAR = 64
"""Where the kernels here keep an mbarrier; data is at byte 0."""


def launch(
    kernel: Callable[[Warp], Any],
    *,
    warps: int = 2,
    cluster: int = 1,
    blocks: int | None = None,
    **options: Any,
) -> None:
    run_kernel(
        lambda: kernel(current()),
        (blocks or cluster, 1),
        cluster,
        warps,
        128,
        (),
        memory=GlobalMemory(),
        **options,
    )


def set_up(warp: Warp, count: int = 1, offset: int = BAR) -> None:
    """Warp 0 sets up an mbarrier; then all go on."""
    if warp.index == 0:
        warp.block.init_mbarrier(offset, count, "bar")
    warp.sync(warp.cluster.all_warps)


def copy(warp: Warp, to: Any = None) -> None:
    """Starts a copy of 16 ones to byte 0, for the barrier there."""
    block = to or warp.block
    data = np.ones((1, 16), np.uint8)
    warp.write_async(block, 0, (1, 16), lambda: data, block.mbarrier(BAR))
