"""The mover: all layers' rows of a plan, copied in one launch.

A row is cut into 16-byte words and one thread takes one word of one chain in one layer. It walks the chain from the
free end, so what it overwrites it has read before, and no other thread touches that word: no staging and no barrier,
however chains and cycles overlap. Words of a row lie side by side in the threads, so the copies are coalesced.

The walk is written once and compiled twice, for the GPU and (by Numba's CPU target) for host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import cuda, njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from sglang_glue.defrag.plan import Plan

WORD = 16
"""Bytes that one thread copies at a time."""
THREADS = 256
BLOCKS_PER_LAYER = 1024
"""Blocks of one layer at most; more work is walked in a grid-stride loop."""


@intrinsic
def _load(typingctx: Any, address: Any) -> Any:
    """Two 64-bit halves of the 16-byte word at ``address``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(64), 2)
        pointer = builder.inttoptr(args[0], vector.as_pointer())
        word = builder.load(pointer, align=WORD)
        halves = [builder.extract_element(word, ir.Constant(ir.IntType(32), i)) for i in range(2)]
        return context.make_tuple(builder, signature.return_type, halves)

    return types.UniTuple(types.int64, 2)(types.int64), codegen


@intrinsic
def _store(typingctx: Any, address: Any, word: Any) -> Any:
    """Write two 64-bit halves to the 16-byte word at ``address``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(64), 2)
        value = ir.Constant(vector, ir.Undefined)
        for i in range(2):
            half = builder.extract_value(args[1], i)
            value = builder.insert_element(value, half, ir.Constant(ir.IntType(32), i))
        builder.store(value, builder.inttoptr(args[0], vector.as_pointer()), align=WORD)
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, 2)), codegen


def _walk(base, row_bytes, path, first, last, cyclic):  # type: ignore[no-untyped-def]
    """Move one word along path[first:last]: path[j + 1] -> path[j], and the first into the last of a cycle."""
    saved = _load(base + path[first] * row_bytes)
    for j in range(first, last - 1):
        _store(base + path[j] * row_bytes, _load(base + path[j + 1] * row_bytes))
    if cyclic:
        _store(base + path[last - 1] * row_bytes, saved)


@cache
def _host_mover() -> Callable[..., None]:
    walk = njit(_walk)

    @njit
    def move(bases, row_bytes, path, start, cyclic):  # type: ignore[no-untyped-def]
        for layer in range(bases.size):
            for chain in range(cyclic.size):
                for offset in range(0, row_bytes[layer], WORD):
                    base = bases[layer] + offset
                    walk(base, row_bytes[layer], path, start[chain], start[chain + 1], cyclic[chain])

    return move  # type: ignore[no-any-return]


@cache
def _gpu_mover() -> Any:
    walk = cuda.jit(device=True)(_walk)

    @cuda.jit
    def move(bases, row_bytes, path, start, cyclic):  # type: ignore[no-untyped-def]
        layer = cuda.blockIdx.y
        words = row_bytes[layer] // WORD
        work = cyclic.size * words
        item = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        while item < work:
            chain = item // words
            base = bases[layer] + (item - chain * words) * WORD
            walk(base, row_bytes[layer], path, start[chain], start[chain + 1], cyclic[chain])
            item += cuda.gridDim.x * cuda.blockDim.x

    return move


@dataclass(frozen=True)
class Pools:
    """Where the rows are: the base address and row size in bytes of every layer's buffer, of all pools that share
    the slot numbers, and their number of rows (slots, the sink included)."""

    bases: NDArray[np.int64]
    row_bytes: NDArray[np.int64]
    rows: int

    def __post_init__(self) -> None:
        for i, (base, row) in enumerate(zip(self.bases.tolist(), self.row_bytes.tolist(), strict=True)):
            if row < WORD or row % WORD:
                raise ValueError(f"layer buffer {i}: a row has {row} bytes, expected a multiple of {WORD}")
            if base % WORD:
                raise ValueError(f"layer buffer {i}: address {base:#x} is not aligned to {WORD} bytes")

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers and pools."""
        return int(self.row_bytes.sum())


def pools_of_arrays(buffers: Sequence[NDArray[Any]]) -> Pools:
    """Pools in host memory: C-contiguous arrays, the first dimension is the slot."""
    for i, buffer in enumerate(buffers):
        if not buffer.flags.c_contiguous or not buffer.flags.writeable:
            raise ValueError(f"layer buffer {i}: expected a writable C-contiguous array")
    return Pools(
        np.array([b.ctypes.data for b in buffers], np.int64),
        np.array([b.nbytes // b.shape[0] for b in buffers], np.int64),
        min(b.shape[0] for b in buffers),
    )


def move_on_host(pools: Pools, plan: Plan) -> int:
    """Move the rows of a plan in host memory; returns the bytes moved."""
    _check(pools, plan)
    if len(plan):
        _host_mover()(pools.bases, pools.row_bytes, plan.path, plan.start, plan.cyclic)
    return len(plan) * pools.slot_bytes


def move_on_gpu(pools: Pools, plan: Plan, stream: int) -> int:
    """Move the rows of a plan in device memory, by one launch on the CUDA stream with handle ``stream``.

    Uploads the plan (a few bytes a row) and returns the bytes that will have moved once the stream gets there.
    """
    _check(pools, plan)
    if len(plan):
        stage(pools, plan, stream)()
    return len(plan) * pools.slot_bytes


def warm_up_gpu(pools: Pools, stream: int) -> None:
    """Compile and load the kernel for the current device, by a launch that reads one row and writes none."""
    nothing = np.empty(0, np.int64)
    stage(pools, Plan(nothing, nothing, np.zeros(1, np.int64), np.array([0, 1]), np.zeros(1, bool)), stream)()


def stage(pools: Pools, plan: Plan, stream: int) -> Callable[[], None]:
    """Upload a plan that moves something; returns what launches it."""
    on = cuda.external_stream(stream) if stream else cuda.default_stream()
    upload = [cuda.to_device(a, on) for a in (pools.bases, pools.row_bytes, plan.path, plan.start, plan.cyclic)]
    words = plan.chains * int(pools.row_bytes.max()) // WORD
    blocks = min(BLOCKS_PER_LAYER, -(-words // THREADS))
    return partial(_gpu_mover()[(blocks, pools.bases.size), THREADS, on], *upload)


def move_reference(buffers: Sequence[NDArray[Any]], plan: Plan) -> None:
    """What a plan means, in two lines of NumPy: read every source row, then write every destination row."""
    for buffer in buffers:
        buffer[plan.dst] = buffer[plan.src]


def _check(pools: Pools, plan: Plan) -> None:
    if len(plan) and int(plan.path.max()) >= pools.rows:
        raise ValueError(f"plan names slot {int(plan.path.max())}, the pools have {pools.rows} rows")
