"""Small kernels with one property each, for the audit to find."""

from __future__ import annotations

from verify_numba.gpu.spec import KernelSpec


def _signature():
    from numba import types

    return (types.int64, types.int32, types.float32)


def _inline(asm: str, constraints: str = "", types_of=()):
    """An intrinsic without result that emits `asm` with integer operands."""
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic

    def code(_context, builder, _signature, args):
        function = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
        builder.call(ir.InlineAsm(function, asm, constraints, side_effect=True), args)

    if types_of:

        @intrinsic
        def emit(typing_context, a, b):
            return types.void(*types_of), code
    else:

        @intrinsic
        def emit(typing_context):
            return types.void(), code

    return emit


def _clean():
    from numba import cuda, float32

    def kernel(out, n, scale):
        shared = cuda.shared.array(96, float32)
        i = cuda.threadIdx.x
        if i < 96:
            shared[i] = scale
        cuda.syncthreads()
        if i < 96 and n > 0:
            shared[i] += shared[95 - i]

    return kernel


def _empty():
    def kernel(out, n, scale):
        return

    return kernel


def _spilling():
    from numba import cuda, float32

    def kernel(out, n, scale):
        i = cuda.threadIdx.x
        shared = cuda.shared.array(96, float32)
        live = cuda.local.array(96, float32)
        for j in range(96):
            live[j] = scale * j + i
        for _ in range(n):
            for j in range(96):
                live[j] = live[j] * live[(j + 7) % 96] + float32(0.5)
            cuda.syncthreads()
        for j in range(96):
            shared[j] += live[j]

    return kernel


def _tensor_map():
    from numba import types

    fetch = _inline(
        "cp.async.bulk.prefetch.tensor.1d.L2.global.tile [$0, {$1}];", "l,r", (types.int64, types.int32)
    )

    def kernel(out, n, scale):
        fetch(out, n)

    return kernel


def _not_ptx():
    nonsense = _inline("no.such.instruction;")

    def kernel(out, n, scale):
        nonsense()

    return kernel


def _untypable():
    def kernel(out, n, scale):
        out.no_such_method()

    return kernel


CLEAN = KernelSpec("clean", _clean, _signature, threads=128, smem_bytes=1024)
CLUSTER = KernelSpec("pair", _clean, _signature, threads=128, smem_bytes=0, cluster=2, min_cc=(9, 0))
SPILLING = KernelSpec("spilling", _spilling, _signature, threads=256, smem_bytes=0, max_registers=48)
TENSOR_MAP = KernelSpec("tensor-map", _tensor_map, _signature, threads=32, smem_bytes=0, min_cc=(9, 0))
LARGEST = KernelSpec("largest", _empty, _signature, threads=128, smem_bytes=101_376)
TOO_LARGE = KernelSpec("too-large", _empty, _signature, threads=128, smem_bytes=101_376 + 16)
CROWDED = KernelSpec("crowded", _empty, _signature, threads=128, smem_bytes=60_000, min_blocks=2)
NOT_PTX = KernelSpec("not-ptx", _not_ptx, _signature, threads=32, smem_bytes=0)
UNTYPABLE = KernelSpec("untypable", _untypable, _signature, threads=32, smem_bytes=0)


def good() -> list[KernelSpec]:
    return [CLEAN, CLUSTER]


def everything() -> list[KernelSpec]:
    return [
        CLEAN, CLUSTER, SPILLING, TENSOR_MAP, LARGEST, TOO_LARGE, CROWDED, NOT_PTX, UNTYPABLE,
    ]  # fmt: skip


def without_clusters() -> list[KernelSpec]:
    return [CLEAN]


def only_clusters() -> list[KernelSpec]:
    return [CLUSTER]


def twice() -> list[KernelSpec]:
    return [CLEAN, CLEAN]


def none() -> list[KernelSpec]:
    return []
