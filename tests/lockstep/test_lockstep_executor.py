"""The executor by small kernels: turns, barriers, deadlocks, copies in flight, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from tests.lockstep.small_kernels import BAR, copy, launch, set_up
from verify_numba.lockstep import DeadlockError, LockstepError, MemoryFault, ProtocolError
from verify_numba.lockstep.machine import Warp, current


def test_without_a_seed_warps_take_turns_in_order() -> None:
    log: list[int] = []

    def kernel(warp: Warp) -> None:
        for _ in range(2):
            log.append(warp.index)
            warp.sync(warp.block.all_warps)

    launch(kernel, warps=3)
    assert log == [0, 1, 2, 2, 0, 1]  # the last to arrive goes on at once


def test_a_seed_fixes_the_order_and_another_seed_changes_it() -> None:
    def order(seed: int) -> list[int]:
        log: list[int] = []

        def kernel(warp: Warp) -> None:
            for _ in range(5):
                warp.read(0, np.uint8, (1,))
                log.append(warp.index)

        launch(kernel, warps=4, seed=seed)
        return log

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(5)}) == 5


def test_blocks_of_a_cluster_run_side_by_side_and_clusters_after_one_another() -> None:
    log: list[int] = []

    def kernel(warp: Warp) -> None:
        warp.sync(warp.cluster.all_warps)
        log.append(warp.block.x)
        warp.sync(warp.cluster.all_warps)

    launch(kernel, warps=1, cluster=2, blocks=4)
    assert [sorted(log[:2]), sorted(log[2:])] == [[0, 1], [2, 3]]


def test_a_seed_shuffles_the_clusters() -> None:
    def order(seed: int) -> list[int]:
        log: list[int] = []
        launch(lambda warp: log.append(warp.block.x), warps=1, blocks=6, seed=seed)
        return log

    assert sorted(order(0)) == list(range(6))
    assert len({tuple(order(seed)) for seed in range(5)}) > 1


def test_a_fresh_barrier_lets_parity_one_pass_and_holds_parity_zero() -> None:
    passed: list[str] = []

    def kernel(warp: Warp) -> None:
        set_up(warp)
        if warp.index == 0:
            warp.wait_mbarrier(BAR, 1)
            passed.append("parity 1")
            warp.arrive_mbarrier(BAR)
        else:
            warp.wait_mbarrier(BAR, 0)
            passed.append("parity 0")

    launch(kernel)
    assert passed == ["parity 1", "parity 0"]


def test_a_phase_takes_all_its_arrivals() -> None:
    def kernel(warp: Warp) -> None:
        set_up(warp, count=3)
        barrier = warp.block.mbarrier(BAR)
        if warp.index == 0:
            warp.arrive_mbarrier(BAR)
            warp.arrive_mbarrier(BAR)
            assert (barrier.phase, barrier.pending) == (0, 1)
            warp.arrive_mbarrier(BAR)
            assert (barrier.phase, barrier.pending) == (1, 3)

    launch(kernel, warps=1)


def test_a_phase_takes_all_its_bytes_in_either_order() -> None:
    def kernel(warp: Warp) -> None:
        set_up(warp)
        barrier = warp.block.mbarrier(BAR)
        warp.arrive_mbarrier(BAR, 16)
        assert (barrier.phase, barrier.tx) == (0, 16)
        copy(warp)
        assert (barrier.phase, barrier.tx) == (1, 0)
        copy(warp)
        assert (barrier.phase, barrier.tx) == (1, -16)
        warp.arrive_mbarrier(BAR, 16)
        assert (barrier.phase, barrier.tx) == (2, 0)

    launch(kernel, warps=1)


def test_a_deadlock_names_every_waiting_warp_and_its_barrier() -> None:
    def kernel(warp: Warp) -> None:
        set_up(warp, count=2)
        if warp.index < 2:
            warp.wait_mbarrier(BAR, 0)

    with pytest.raises(DeadlockError) as error:
        launch(kernel, warps=3)
    lines = str(error.value).splitlines()
    assert [line.split(" waits")[0].strip() for line in lines[1:]] == [
        "warp 0 of block (0, 0)",
        "warp 1 of block (0, 0)",
    ]
    assert "bar at byte 64" in lines[1]
    assert "phase 0: 2 of 2 arrivals and 0 bytes are missing" in lines[1]
    assert "for parity 0" in lines[1]


def test_an_arrival_too_many_is_an_error() -> None:
    def kernel(warp: Warp) -> None:
        set_up(warp, count=2)
        warp.block.mbarrier(BAR).arrive(3, None)

    with pytest.raises(ProtocolError, match="warp 0 of block .* 3 arrivals too many at bar"):
        launch(kernel, warps=1)


def test_a_barrier_that_was_not_set_up_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="no mbarrier was set up at shared byte 64"):
        launch(lambda warp: warp.wait_mbarrier(BAR, 1))


@pytest.mark.parametrize("offset", [4, 128, -8])
def test_a_barrier_must_lie_in_shared_memory(offset: int) -> None:
    with pytest.raises(MemoryFault, match=f"cannot be at shared byte {offset}"):
        launch(lambda warp: set_up(warp, offset=offset))


def test_a_warp_must_not_exit_while_others_wait_for_it() -> None:
    def kernel(warp: Warp) -> None:
        if warp.index == 0:
            warp.sync(warp.block.all_warps)

    with pytest.raises(ProtocolError, match=r"warp 1 .* exited while warp 0 of block \(0, 0\) waits"):
        launch(kernel)


def test_a_launch_must_not_end_amid_a_barrier() -> None:
    with pytest.raises(ProtocolError, match="ended amid a phase of the barrier of block .*: 1 of 2 warps"):
        launch(lambda warp: warp.index or warp.arrive(warp.block.all_warps))


def test_a_warp_must_not_arrive_twice_in_a_phase() -> None:
    def kernel(warp: Warp) -> None:
        warp.arrive(warp.block.all_warps)
        warp.arrive(warp.block.all_warps)

    with pytest.raises(ProtocolError, match="arrived twice"):
        launch(kernel)


def test_bytes_that_never_come_are_an_error() -> None:
    def kernel(warp: Warp) -> None:
        set_up(warp)
        warp.arrive_mbarrier(BAR, 16)

    with pytest.raises(ProtocolError, match="bytes are pending at bar .* 16 bytes are missing"):
        launch(kernel, warps=1)


def test_a_copy_that_nobody_waits_for_is_an_error() -> None:
    def kernel(warp: Warp) -> None:
        set_up(warp)
        warp.arrive_mbarrier(BAR, 16)
        copy(warp)

    launch(kernel, warps=1)
    with pytest.raises(
        ProtocolError, match="the last of its block, exited while the copy for bar .* is in flight"
    ):
        launch(kernel, warps=1, adversarial=True)


def test_a_write_to_a_block_that_has_exited_is_an_error() -> None:
    def kernel(warp: Warp) -> None:
        set_up(warp)
        if warp.block.x == 0:
            copy(warp, to=warp.cluster.blocks[1])

    with pytest.raises(ProtocolError, match=r"sent to block \(1, 0\), which has exited"):
        for seed in range(20):
            launch(kernel, warps=1, cluster=2, seed=seed)


def test_adversarial_copies_are_poison_until_the_barrier_says_otherwise() -> None:
    seen: list[int] = []

    def kernel(warp: Warp) -> None:
        set_up(warp)
        warp.write(0, np.uint8, (16,))[:] = 7
        warp.arrive_mbarrier(BAR, 16)
        copy(warp)
        seen.append(int(warp.read(0, np.uint8, (1,))[0]))
        warp.wait_mbarrier(BAR, 0)
        seen.append(int(warp.read(0, np.uint8, (1,))[0]))

    launch(kernel, warps=1, adversarial=True)
    assert seen == [0xFF, 1]


def test_adversarial_data_may_land_long_before_it_is_complete() -> None:
    """A copy that overwrites what is still being read must show, so data and completion come apart."""
    before: set[int] = set()

    def kernel(warp: Warp) -> None:
        set_up(warp)
        warp.arrive_mbarrier(BAR, 16)
        copy(warp)
        for _ in range(20):
            if not warp.block.mbarrier(BAR).passed(0):
                before.add(int(warp.read(0, np.uint8, (1,))[0]))
        warp.wait_mbarrier(BAR, 0)

    for seed in range(10):
        launch(kernel, warps=1, adversarial=True, seed=seed)
    assert before == {0xFF, 1}


def test_shared_memory_starts_as_poison_in_every_block() -> None:
    first: list[int] = []

    def kernel(warp: Warp) -> None:
        values = warp.write(0, np.float32, (32,))
        first.append(int(np.isnan(values).sum()))
        values[:] = 0

    launch(kernel, warps=1, blocks=3)
    assert first == [32, 32, 32]


@pytest.mark.parametrize(("offset", "shape"), [(-4, (1,)), (124, (2,)), (2, (1,)), (0, (33,))])
def test_shared_accesses_are_checked(offset: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(MemoryFault, match=r"warp 0 of block \(0, 0\): access to shared bytes"):
        launch(lambda warp: warp.read(offset, np.float32, shape), warps=1)


def test_what_a_kernel_raises_comes_out_and_names_the_warp() -> None:
    def kernel(warp: Warp) -> None:
        if warp.index == 1:
            raise OverflowError("too much")
        warp.sync(warp.block.all_warps)

    with pytest.raises(OverflowError) as error:
        launch(kernel)
    assert error.value.__notes__ == ["in warp 1 of block (0, 0)"]


def test_the_grid_must_hold_whole_clusters() -> None:
    with pytest.raises(ValueError, match=r"grid\[0\] is 3, expected a multiple of the cluster size 2"):
        launch(lambda warp: None, cluster=2, blocks=3)


def test_operations_need_a_launch() -> None:
    with pytest.raises(LockstepError, match="only inside a kernel"):
        current()


def test_a_kernel_may_launch_no_warning() -> None:
    with np.errstate(all="raise"):
        launch(lambda warp: np.float32(1) / np.zeros(1, np.float32))
