"""Small kernels that tests compile and launch, and the intrinsics they need."""

from __future__ import annotations

import os
from pathlib import Path

from verify_numba.gpu.spec import KernelSpec

BUILD_LOG = "TOY_BUILD_LOG"
"""Environment variable: the file that `logged` appends a line to each time the kernel is built."""


def signature():
    from numba import types

    return (types.int64, types.int32, types.float32)


def _asm(text: str, constraints: str, result: str, arguments: tuple[str, ...]):
    """An intrinsic that emits one line of PTX; `result` and `arguments` name numba types."""
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic

    llvm = {
        "void": ir.VoidType(),
        "int32": ir.IntType(32),
        "int64": ir.IntType(64),
        "float32": ir.FloatType(),
    }
    numba_signature = getattr(types, result)(*(getattr(types, name) for name in arguments))

    def code(_context, builder, _signature, values):
        function = ir.FunctionType(llvm[result], [llvm[name] for name in arguments])
        return builder.call(ir.InlineAsm(function, text, constraints, side_effect=True), values)

    if arguments:

        @intrinsic
        def emit(typing_context, address, value):
            return numba_signature, code
    else:

        @intrinsic
        def emit(typing_context):
            return numba_signature, code

    return emit


def store_float():
    return _asm("st.global.f32 [$0], $1;", "l,f,~{memory}", "void", ("int64", "float32"))


def build_fill():
    """out[i] = value for i < n, one block a multiple of threads."""
    from numba import cuda

    store = store_float()

    def fill(out, n, value):
        i = cuda.grid(1)
        if i < n:
            store(out + 4 * i, value)

    return fill


def build_shared_ends():
    """Writes the first and the last float of the dynamic shared memory, out[0..1] gets them back."""
    from numba import cuda, float32

    store = store_float()

    def shared_ends(out, n, value):
        shared = cuda.shared.array(0, float32)
        if cuda.threadIdx.x == 0:
            shared[0] = value
            shared[n - 1] = value + float32(1.0)
        cuda.syncthreads()
        if cuda.threadIdx.x == 1:
            store(out, shared[0])
            store(out + 4, shared[n - 1])

    return shared_ends


def build_ranks():
    """out[block] = rank of the block in its cluster + value."""
    from numba import cuda, float32

    store = store_float()
    rank = _asm("mov.u32 $0, %cluster_ctarank;", "=r", "int32", ())

    def ranks(out, n, value):
        if cuda.threadIdx.x == 0 and cuda.blockIdx.x < n:
            store(out + 4 * cuda.blockIdx.x, float32(rank()) + value)

    return ranks


def build_logged():
    """A trivial kernel whose building leaves a line in the file that TOY_BUILD_LOG names."""
    with Path(os.environ[BUILD_LOG]).open("a") as log:
        log.write(f"{os.getpid()}\n")

    def logged(out, n, value):
        return

    return logged


def build_many_registers():
    from numba import cuda, float32

    def many_registers(out, n, value):
        live = cuda.local.array(96, float32)
        shared = cuda.shared.array(96, float32)
        for j in range(96):
            live[j] = value * j + cuda.threadIdx.x
        for _ in range(n):
            for j in range(96):
                live[j] = live[j] * live[(j + 7) % 96] + float32(0.5)
            cuda.syncthreads()
        for j in range(96):
            shared[j] += live[j]

    return many_registers


FILL = KernelSpec("toy-fill", build_fill, signature, threads=128, smem_bytes=0)
LOGGED = KernelSpec("toy-logged", build_logged, signature, threads=32, smem_bytes=0)
RANKS = KernelSpec("toy-ranks", build_ranks, signature, threads=32, smem_bytes=0, cluster=2, min_cc=(9, 0))
EARLY = KernelSpec("toy-early", build_fill, signature, threads=128, smem_bytes=0, pdl=True, min_cc=(9, 0))


def shared_ends(smem_bytes: int) -> KernelSpec:
    return KernelSpec(
        f"toy-shared-{smem_bytes}", build_shared_ends, signature, threads=64, smem_bytes=smem_bytes
    )
