"""The two memories of a launch: global memory as a registry of arrays, shared memory as poisoned bytes."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import DTypeLike, NDArray

from verify_numba.lockstep.errors import MemoryFault

Bytes = NDArray[np.uint8]

FIRST_ADDRESS = 1 << 40
"""Far beyond int32, so that an address squeezed through 32 bits cannot go unnoticed."""
GAP = 1 << 20
"""Unmapped bytes between two buffers."""
ALIGNMENT = 256
"""Of the first byte of every buffer, as device allocators give."""
POISON = 0xFF
"""Fills memory that nobody has written: NaN as bf16 and as float32, -1 as int32."""


class _Window:
    """The memory from an array's first to its last byte, for NumPy to look at in place."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array
        self.low, high = byte_bounds(array)
        self.__array_interface__ = {
            "shape": (high - self.low if array.size else 0,),
            "typestr": "|u1",
            "data": (self.low, not array.flags.writeable),
            "version": 3,
        }


@dataclass(frozen=True)
class Buffer:
    """One registered array: its bytes, strides included, stand at `[address, address + data.size)`."""

    name: str
    address: int
    data: Bytes


class GlobalMemory:
    """Arrays under made-up addresses. They are used in place: what a kernel stores is in the caller's array.

    Between two buffers lie unmapped bytes, so running over the end of one never reaches another.
    """

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self._starts: list[int] = []
        self._next = FIRST_ADDRESS

    def add(self, name: str, array: NDArray[Any]) -> int:
        """Registers `array` (any dtype, any strides) and returns the address of its first element."""
        window = _Window(array)
        buffer = Buffer(name, self._next, np.asarray(window))
        self._buffers.append(buffer)
        self._starts.append(buffer.address)
        self._next += -(-(buffer.data.size + GAP) // ALIGNMENT) * ALIGNMENT
        return buffer.address + (array.ctypes.data - window.low if array.size else 0)

    def bytes(self, address: int, nbytes: int, align: int = 1) -> Bytes:
        """A view of `nbytes` bytes at `address`.

        Raises:
            MemoryFault: they are not all in one buffer, or `address` is not a multiple of `align`.
        """
        buffer = self._buffer(address, address + nbytes, align)
        start = address - buffer.address
        return buffer.data[start : start + nbytes]

    def load(self, address: int, dtype: DTypeLike, count: int) -> NDArray[Any]:
        """A copy of `count` elements at `address`."""
        size = np.dtype(dtype).itemsize
        return self.bytes(address, count * size, size).copy().view(dtype)

    def store(self, address: int, values: NDArray[Any]) -> None:
        """Writes `values`, flattened, at `address`."""
        self._writable(address, values.nbytes, values.itemsize)[:] = (
            np.ascontiguousarray(values).view(np.uint8).ravel()
        )

    def load_rows(self, addresses: NDArray[np.int64], nbytes: int, align: int) -> Bytes:
        """`[len(addresses), nbytes]` bytes: one run of bytes from each address, all in one buffer."""
        windows, starts = self._windows(addresses, nbytes, align)
        rows: Bytes = windows[starts]
        return rows

    def store_rows(self, addresses: NDArray[np.int64], rows: Bytes, align: int) -> None:
        """Writes `rows[i]` at `addresses[i]`; the counterpart of `load_rows`."""
        windows, starts = self._windows(addresses, rows.shape[1], align)
        if not windows.flags.writeable:
            self._writable(int(addresses[0]), rows.shape[1], align)
        windows[starts] = rows

    def check_rows(self, addresses: NDArray[np.int64], nbytes: int, align: int) -> None:
        """The checks of `load_rows` alone."""
        self._windows(addresses, nbytes, align)

    def _windows(
        self, addresses: NDArray[np.int64], nbytes: int, align: int
    ) -> tuple[Bytes, NDArray[np.int64]]:
        """All runs of `nbytes` bytes of the buffer as one overlapping view, and those asked for."""
        low, high = int(addresses.min()), int(addresses.max())
        buffer = self._buffer(low, high + nbytes, 1)
        if align > 1 and (addresses % align).any():
            self._buffer(int(addresses[addresses % align != 0][0]), high + nbytes, align)
        runs = buffer.data.size - nbytes + 1
        view: Bytes = np.ndarray((runs, nbytes), np.uint8, buffer.data, strides=(1, 1))
        return view, addresses - buffer.address

    def _writable(self, address: int, nbytes: int, align: int) -> Bytes:
        view = self.bytes(address, nbytes, align)
        if not view.flags.writeable:
            raise MemoryFault(f"store of {nbytes} bytes to {self._place(address)}, which is read-only")
        return view

    def _buffer(self, start: int, stop: int, align: int) -> Buffer:
        index = bisect_right(self._starts, start) - 1
        if index >= 0:
            buffer = self._buffers[index]
            if stop <= buffer.address + buffer.data.size:
                if start % align:
                    raise MemoryFault(
                        f"access to {self._place(start)}, which is not a multiple of {align} bytes"
                    )
                return buffer
        raise MemoryFault(f"access to {stop - start} bytes from {self._place(start)}")

    def _place(self, address: int) -> str:
        """The address as a user would name it: the nearest buffer and the offset in it."""
        if not self._buffers:
            return f"address {address:#x} (no buffer is registered)"
        after = max(bisect_right(self._starts, address), 1)
        near = self._buffers[after - 1]
        if (
            after < len(self._buffers)
            and self._starts[after] - address < address - near.address - near.data.size
        ):
            near = self._buffers[after]
        if abs(address - near.address) > near.data.size + GAP:
            return f"address {address:#x}, which is in no buffer"
        return f"'{near.name}' at byte {address - near.address} of {near.data.size}"


class SharedMemory:
    """Dynamic shared memory of one block; every byte is poison until somebody writes it."""

    def __init__(self, nbytes: int) -> None:
        self.data: Bytes = np.full(nbytes, POISON, np.uint8)

    def view(
        self, offset: int, dtype: DTypeLike, shape: tuple[int, ...], row_stride: int | None = None
    ) -> NDArray[Any]:
        """The array at `offset`, in place; `row_stride` (bytes) is given where rows are padded.

        Raises:
            MemoryFault: it does not lie within the block's shared memory, or is misaligned.
        """
        kind = np.dtype(dtype)
        inner = kind.itemsize
        for extent in shape[1:]:
            inner *= extent
        stride = inner if row_stride is None else row_stride
        stop = offset + stride * (shape[0] - 1) + inner
        if offset < 0 or stop > self.data.size or offset % kind.itemsize:
            raise MemoryFault(
                f"access to shared bytes {offset} to {stop} of {self.data.size} as {kind.name}"
                + (": misaligned" if offset % kind.itemsize else "")
            )
        if row_stride is None:
            return np.ndarray(shape, kind, self.data, offset)
        return np.ndarray(shape, kind, self.data, offset, (row_stride, kind.itemsize))
