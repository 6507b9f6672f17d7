"""Accesses that no barrier orders are found, whatever order they ran in, and no others."""

from __future__ import annotations

import numpy as np
import pytest

from tests.lockstep.small_kernels import BAR, copy, launch, set_up
from verify_numba.lockstep import RaceError
from verify_numba.lockstep.machine import Warp


def test_a_read_before_the_barrier_that_publishes_a_write() -> None:
    def kernel(warp: Warp) -> None:
        if warp.index == 0:
            warp.write(16, np.int32, (4,))
        else:
            warp.read(28, np.int32, (1,))
        warp.sync(warp.block.all_warps)

    with pytest.raises(
        RaceError, match=r"warp 1 .* reads shared byte 28, which warp 0 of block \(0, 0\) wrote"
    ):
        launch(kernel, check_races=True)


def test_a_write_over_what_another_warp_reads() -> None:
    def kernel(warp: Warp) -> None:
        if warp.index == 0:
            warp.read(0, np.int32, (4,))
        else:
            warp.write(0, np.int32, (4,))

    with pytest.raises(
        RaceError, match=r"warp 1 .* writes shared byte 0, which warp 0 of block \(0, 0\) read"
    ):
        launch(kernel, check_races=True)


def test_neighbouring_words_do_not_race() -> None:
    launch(lambda warp: warp.write(4 * warp.index, np.int32, (1,)), check_races=True)


def test_padded_rows_race_only_where_they_are() -> None:
    launch(lambda warp: warp.write(8 * warp.index, np.int32, (4, 2), 16), check_races=True)
    with pytest.raises(RaceError):
        launch(lambda warp: warp.write(4 * warp.index, np.int32, (4, 2), 16), check_races=True)


def test_a_barrier_puts_accesses_in_order() -> None:
    def kernel(warp: Warp) -> None:
        for turn in range(4):
            if turn % 2 == warp.index:
                warp.write(0, np.int32, (4,))
            warp.sync(warp.block.all_warps)
            warp.read(0, np.int32, (4,))
            warp.sync(warp.block.all_warps)

    launch(kernel, check_races=True)


def test_an_mbarrier_orders_only_what_was_done_before_the_arrival() -> None:
    def kernel(warp: Warp, late: bool) -> None:
        set_up(warp)
        if warp.index == 0:
            warp.write(0, np.int32, (1,))
            warp.arrive_mbarrier(BAR)
            if late:
                warp.write(0, np.int32, (1,))
        else:
            warp.wait_mbarrier(BAR, 0)
            warp.read(0, np.int32, (1,))

    launch(lambda warp: kernel(warp, False), check_races=True)
    with pytest.raises(RaceError):
        launch(lambda warp: kernel(warp, True), check_races=True)


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_is_not_ordered_after_the_warp_that_issued_it(waits: bool) -> None:
    def kernel(warp: Warp) -> None:
        set_up(warp)
        warp.arrive_mbarrier(BAR, 16)
        copy(warp)
        if waits:
            warp.wait_mbarrier(BAR, 0)
        warp.read(0, np.uint8, (16,))

    if waits:
        launch(kernel, warps=1, check_races=True)
    else:
        with pytest.raises(RaceError, match="which a copy that completes at bar .* wrote"):
            launch(kernel, warps=1, check_races=True)


def test_a_copy_over_what_another_warp_still_reads() -> None:
    def kernel(warp: Warp) -> None:
        set_up(warp)
        if warp.index == 1:  # the last to arrive goes on first
            warp.read(0, np.uint8, (16,))
        else:
            warp.arrive_mbarrier(BAR, 16)
            copy(warp)

    with pytest.raises(RaceError, match="a copy that completes at bar .* writes shared byte 0"):
        launch(kernel, check_races=True)


def test_a_remote_write_races_with_the_partners_reads() -> None:
    def kernel(warp: Warp) -> None:
        set_up(warp)
        if warp.block.x == 1:
            warp.read(0, np.uint8, (16,))
        else:
            copy(warp, to=warp.cluster.blocks[1])
        warp.sync(warp.cluster.all_warps)

    with pytest.raises(RaceError, match=r"which warp 0 of block \(1, 0\) read"):
        launch(kernel, warps=1, cluster=2, check_races=True)
