"""Global memory of a lockstep launch: arrays in place, every access checked."""

from __future__ import annotations

import numpy as np
import pytest

from verify_numba.lockstep import GlobalMemory, MemoryFault


def test_loads_and_stores_work_on_the_callers_array() -> None:
    array = np.arange(10, dtype=np.int32)
    memory = GlobalMemory()
    address = memory.add("array", array)
    assert memory.load(address + 8, np.int32, 3).tolist() == [2, 3, 4]
    memory.store(address + 4, np.array([7, 8], np.int32))
    assert array[:4].tolist() == [0, 7, 8, 3]
    array[5] = 50
    assert memory.load(address + 20, np.int32, 1)[0] == 50


def test_a_strided_view_is_addressed_by_its_strides() -> None:
    base = np.arange(60, dtype=np.int16).reshape(3, 4, 5)
    view = base.transpose(1, 0, 2)[1:, ::-1]
    memory = GlobalMemory()
    address = memory.add("view", view)
    for index in np.ndindex(view.shape):
        at = address + int(np.dot(index, view.strides))
        assert memory.load(at, np.int16, 1)[0] == view[index]


def test_rows_are_gathered_and_scattered() -> None:
    array = np.arange(40, dtype=np.uint8).reshape(10, 4)
    memory = GlobalMemory()
    address = memory.add("array", array)
    at = address + np.array([8, 0, 36])
    assert memory.load_rows(at, 4, 4).tolist() == array[[2, 0, 9]].tolist()
    memory.store_rows(at[:2], np.array([[1, 1, 1, 1], [2, 2, 2, 2]], np.uint8), 4)
    assert array[2].tolist() == [1] * 4
    assert array[0].tolist() == [2] * 4


def test_offsets_beyond_32_bits() -> None:
    big = np.zeros((1 << 32) + 64, np.uint8)  # never touched, so it costs no memory
    big[(1 << 32) + 16] = 9
    memory = GlobalMemory()
    address = memory.add("big", big)
    rows = memory.load_rows(address + np.array([1 << 32]), 32, 16)
    assert rows[0, 16] == 9


@pytest.mark.parametrize(
    ("offset", "nbytes", "what"),
    [
        (-4, 4, "'middle' at byte -4 of 40"),
        (40, 4, "'middle' at byte 40 of 40"),
        (38, 4, "'middle' at byte 38 of 40"),
        (0, 44, "'middle' at byte 0 of 40"),
    ],
)
def test_a_fault_names_the_nearest_buffer_and_the_offset(offset: int, nbytes: int, what: str) -> None:
    memory = GlobalMemory()
    memory.add("first", np.zeros(10, np.int32))
    address = memory.add("middle", np.zeros(10, np.int32))
    memory.add("last", np.zeros(10, np.int32))
    with pytest.raises(MemoryFault, match=what):
        memory.bytes(address + offset, nbytes)


def test_a_gather_must_stay_in_one_buffer() -> None:
    memory = GlobalMemory()
    first = memory.add("first", np.zeros(64, np.uint8))
    second = memory.add("second", np.zeros(64, np.uint8))
    with pytest.raises(MemoryFault):
        memory.load_rows(np.array([first, second]), 16, 16)
    with pytest.raises(MemoryFault, match="'first' at byte 56"):
        memory.load_rows(np.array([first + 56]), 16, 8)


@pytest.mark.parametrize("address", [0, 4096, -1])
def test_an_address_of_nothing(address: int) -> None:
    memory = GlobalMemory()
    with pytest.raises(MemoryFault, match="no buffer is registered"):
        memory.bytes(address, 4)
    memory.add("array", np.zeros(4))
    with pytest.raises(MemoryFault, match="which is in no buffer"):
        memory.bytes(address, 4)


def test_misaligned_accesses() -> None:
    memory = GlobalMemory()
    address = memory.add("array", np.zeros(64, np.uint8))
    with pytest.raises(MemoryFault, match="'array' at byte 2 of 64, which is not a multiple of 4 bytes"):
        memory.load(address + 2, np.int32, 1)
    with pytest.raises(MemoryFault, match="'array' at byte 8 of 64, which is not a multiple of 16"):
        memory.load_rows(address + np.array([0, 8]), 16, 16)


def test_a_read_only_array_is_not_written() -> None:
    array = np.zeros(4, np.int32)
    array.flags.writeable = False
    memory = GlobalMemory()
    address = memory.add("frozen", array)
    assert memory.load(address, np.int32, 4).tolist() == [0] * 4
    with pytest.raises(MemoryFault, match="'frozen' at byte 0 of 16, which is read-only"):
        memory.store(address, np.ones(1, np.int32))
    with pytest.raises(MemoryFault, match="'frozen' at byte 0 of 16, which is read-only"):
        memory.store_rows(np.array([address]), np.ones((1, 4), np.uint8), 4)
    assert not array.any()


def test_an_empty_array_has_an_address_and_no_bytes() -> None:
    memory = GlobalMemory()
    address = memory.add("empty", np.zeros((0, 5), np.int32))
    with pytest.raises(MemoryFault, match="'empty' at byte 0 of 0"):
        memory.bytes(address, 1)


def test_one_array_may_be_two_buffers() -> None:
    array = np.zeros(4, np.int32)
    memory = GlobalMemory()
    a, b = memory.add("a", array), memory.add("b", array)
    memory.store(a, np.array([5], np.int32))
    assert memory.load(b, np.int32, 1)[0] == 5
