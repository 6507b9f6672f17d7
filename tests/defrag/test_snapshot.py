"""The ownership law: every slot has one owner, and a live row reads owned slots only."""

from __future__ import annotations

import timeit

import numpy as np
import pytest

from sglang_glue.defrag.snapshot import OwnershipError, Snapshot, Unit
from tests.defrag.pools import scattered, snapshot_of, units_of


def test_a_whole_pool_passes() -> None:
    snapshot_of(8, [1, 2], [5, 4]).check()
    scattered(3).check()


def test_a_slot_with_two_owners_is_named() -> None:
    broken = Snapshot(8, np.array([3, 6, 7, 8]), units_of([1, 2, 4], [4, 5]), ())
    with pytest.raises(OwnershipError, match=r"slot 4 belongs to unit 0 and unit 1 \(1 of 8 slots"):
        broken.check()


def test_a_slot_that_is_free_twice_or_nowhere_is_named() -> None:
    with pytest.raises(OwnershipError, match="slot 3 belongs to free list and free list"):
        Snapshot(3, np.array([3, 3]), units_of([1, 2]), ()).check()
    with pytest.raises(OwnershipError, match="slot 3 belongs to nothing"):
        Snapshot(3, np.array([], np.int64), units_of([1, 2]), ()).check()


def test_the_sink_and_slots_past_the_pool_are_not_ours() -> None:
    with pytest.raises(OwnershipError, match=r"unit 0: slot 0 lies outside 1\.\.3"):
        Snapshot(3, np.array([3]), units_of([0, 1, 2]), ()).check()
    with pytest.raises(OwnershipError, match=r"free list: slot 4 lies outside 1\.\.3"):
        Snapshot(3, np.array([4]), units_of([1, 2, 3]), ()).check()


def test_a_check_costs_the_pool_once_however_many_own_it() -> None:
    def fastest(owners: int) -> float:
        slots = np.arange(1, 500_001)
        units = tuple(Unit(part, 1, -1, "some") for part in np.array_split(slots, owners))
        snapshot = Snapshot(500_000, np.array([], np.int64), units, ())
        return min(timeit.repeat(snapshot.check, number=1, repeat=3))

    assert fastest(1000) < 20 * fastest(1), "a pass over the pool for each owner takes some hundred times as long"


def test_a_row_that_reads_a_free_slot_is_named() -> None:
    with pytest.raises(OwnershipError, match="live row 0 reads slot 3, which is free"):
        Snapshot(3, np.array([3]), units_of([1, 2]), (np.array([1, 3]),)).check()


@pytest.mark.parametrize("slot", [-1, 0, 4])
def test_a_row_that_reads_what_is_no_slot_is_named(slot: int) -> None:
    with pytest.raises(OwnershipError, match=rf"live row 0 reads slot {slot}, which lies outside 1\.\.3"):
        Snapshot(3, np.array([3]), units_of([1, 2]), (np.array([1, slot, 2]),)).check()


def test_the_digest_sees_every_part() -> None:
    base = snapshot_of(8, [1, 2], [5, 4])
    assert base.digest() == snapshot_of(8, [1, 2], [5, 4]).digest()
    assert Snapshot(8, base.free[::-1], base.units, base.rows).digest() == base.digest(), (
        "the free list is a set"
    )
    others = [
        snapshot_of(8, [2, 1], [5, 4]),
        snapshot_of(8, [1, 2], [5, 4], readers=2),
        snapshot_of(9, [1, 2], [5, 4]),
        Snapshot(8, base.free, base.units, base.rows[:1]),
    ]
    assert len({base.digest(), *(o.digest() for o in others)}) == 5
