"""Inline PTX for Numba: helpers on the LLVM builder, so that one intrinsic can emit a whole register tile.

A register tile is a `UniTuple`; LLVM keeps it in registers. Loops over a tile run here, in Python, while code is
generated: the kernel source stays short and nothing depends on an unroller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic

I32, I64, F32, VOID = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.VoidType()
i32, i64, f32, void = types.int32, types.int64, types.float32, types.void


def tile(kind: Any, n: int) -> types.UniTuple:
    return types.UniTuple(kind, n)


def asm(b: Any, ret: Any, text: str, constraints: str, args: Sequence[Any], volatile: bool = True) -> Any:
    function = ir.FunctionType(ret, [a.type for a in args])
    return b.call(ir.InlineAsm(function, text, constraints, side_effect=volatile), list(args))


def asm_many(
    b: Any, kind: Any, n: int, text: str, constraints: str, args: Sequence[Any], volatile: bool = True
) -> list[Any]:
    """As `asm`, with n results of one type."""
    if n == 1:
        return [asm(b, kind, text, constraints, args, volatile)]
    packed = asm(b, ir.LiteralStructType([kind] * n), text, constraints, args, volatile)
    return [b.extract_value(packed, i) for i in range(n)]


def pack(context: Any, b: Any, kind: Any, values: Sequence[Any]) -> Any:
    out = context.get_constant_undef(kind)
    for i, value in enumerate(values):
        out = b.insert_value(out, value, i)
    return out


def unpack(b: Any, value: Any, n: int) -> list[Any]:
    return [b.extract_value(value, i) for i in range(n)]


def const(value: float) -> Any:
    return ir.Constant(F32, value)


def integer(value: int) -> Any:
    return ir.Constant(I32, value)


def wide(value: int) -> Any:
    return ir.Constant(I64, value)


def plus(offset: int) -> str:
    return f"+{offset}" if offset else ""


def instruction(ret: Any, arg_types: Sequence[Any], text: str, constraints: str, volatile: bool = True) -> Any:
    """An intrinsic for one PTX statement over scalars; `constraints` in LLVM's order (result first)."""
    lowered = {void: VOID, i32: I32, i64: I64, f32: F32}[ret]

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        result = asm(b, lowered, text, constraints, args, volatile)
        return context.get_dummy_value() if ret is void else result

    return by_arity(len(arg_types), lambda: (ret(*arg_types), codegen))


def tile_op(ret: Any, arg_types: Sequence[Any], body: Callable[..., Any]) -> Any:
    """An intrinsic whose code is `body(b, *args)`: that returns a list for a tile, a value for a scalar, else None."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        result = body(b, *args)
        if ret is void:
            return context.get_dummy_value()
        return pack(context, b, ret, result) if isinstance(ret, types.BaseTuple) else result

    return by_arity(len(arg_types), lambda: (ret(*arg_types), codegen))


def by_arity(n: int, answer: Callable[[], Any]) -> Any:
    """Numba reads an intrinsic's arity from its Python signature, so the function is made with n named arguments."""
    names = ", ".join(f"a{i}" for i in range(n))
    scope: dict[str, Any] = {"answer": answer}
    exec(f"def op(typing_context{', ' if n else ''}{names}):\n    return answer()", scope)  # noqa: S102
    return intrinsic(scope["op"])


# --- instructions over fragments -------------------------------------------------------------------------------------


def ldmatrix(b: Any, address: Any, offset: int, n: int, trans: bool = False) -> list[Any]:
    registers = ",".join(f"${i}" for i in range(n))
    form = f"x{n}{'.trans' if trans else ''}"
    text = f"ldmatrix.sync.aligned.m8n8.{form}.shared.b16 {{{registers}}}, [${n}{plus(offset)}];"
    return asm_many(b, I32, n, text, ",".join(["=r"] * n + ["r", "~{memory}"]), [address])


def mma(b: Any, a: Sequence[Any], bb: Sequence[Any], c: Sequence[Any]) -> list[Any]:
    """D = A B + C, bf16 m16n8k16 with float32 sums."""
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    return asm_many(b, F32, 4, text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [*a, *bb, *c], volatile=False)


def ex2(b: Any, x: Any) -> Any:
    return asm(b, F32, "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], volatile=False)


def lg2(b: Any, x: Any) -> Any:
    return asm(b, F32, "lg2.approx.f32 $0, $1;", "=f,f", [x], volatile=False)


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return asm(b, F32, "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, y, z], volatile=False)


def fmax(b: Any, x: Any, y: Any) -> Any:
    """The larger; a NaN loses."""
    return asm(b, F32, "max.f32 $0, $1, $2;", "=f,f,f", [x, y], volatile=False)


def pack_bf16(b: Any, low: Any, high: Any) -> Any:
    return asm(b, I32, "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], volatile=False)


def shuffle_xor(b: Any, x: Any, distance: int) -> Any:
    """The value of the lane whose number differs in bit `distance`; float32 or int32."""
    constraints = "=f,f" if x.type == F32 else "=r,r"
    return asm(b, x.type, f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;", constraints, [x])


def any_lane(b: Any, x: Any) -> Any:
    """1 where x is not 0 in some lane of the warp, in all its lanes."""
    text = "{.reg .pred p, q; setp.ne.s32 p, $1, 0; vote.sync.any.pred q, p, -1; selp.s32 $0, 1, 0, q;}"
    return asm(b, I32, text, "=r,r", [x])


def over_tokens(b: Any, x: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Combine the eight lanes that hold one query row's tokens: lanes with equal lane % 4."""
    for distance in (4, 8, 16):
        x = combine(b, x, shuffle_xor(b, x, distance))
    return x


def add(b: Any, x: Any, y: Any) -> Any:
    return b.fadd(x, y)


def lane_id(b: Any) -> Any:
    return asm(b, I32, "mov.u32 $0, %laneid;", "=r", [], volatile=False)


def anew(b: Any, x: Any) -> Any:
    """x, hidden from the optimiser: what is computed from it inside a loop is not kept in registers over the loop."""
    return asm(b, I32, "mov.b32 $0, $1;", "=r,r", [x])


def less(b: Any, x: Any, bound: int) -> Any:
    """1 where x < bound, as a 32-bit flag for predicated asm."""
    return b.zext(b.icmp_signed("<", x, integer(bound)), I32)


def store_shared(b: Any, address: Any, offset: int, values: Sequence[Any]) -> None:
    """st.shared of one or four words."""
    n, kind = len(values), {F32: "f", I32: "r"}[values[0].type]
    registers = ",".join(f"${i + 1}" for i in range(n))
    data = f".v4.b32 [$0{plus(offset)}], {{{registers}}}" if n == 4 else f".b32 [$0{plus(offset)}], {registers}"
    asm(b, VOID, f"st.shared{data};", ",".join(["r"] + [kind] * n) + ",~{memory}", [address, *values])


def load_shared(b: Any, address: Any, offset: int, n: int, kind: Any = F32) -> list[Any]:
    """ld.shared of one or four words."""
    letter = {F32: "f", I32: "r"}[kind]
    registers = ",".join(f"${i}" for i in range(n))
    data = f".v4.b32 {{{registers}}}" if n == 4 else f".b32 {registers}"
    text = f"ld.shared{data}, [${n}{plus(offset)}];"
    return asm_many(b, kind, n, text, ",".join([f"={letter}"] * n + ["r", "~{memory}"]), [address])


def store_global(b: Any, address: Any, offset: int, values: Sequence[Any], flag: Any | None = None) -> None:
    """st.global of four float32, where the flag is set."""
    store = f"st.global.v4.f32 [$0{plus(offset)}], {{$1,$2,$3,$4}};"
    if flag is None:
        asm(b, VOID, store, "l,f,f,f,f,~{memory}", [address, *values])
    else:
        text = f"{{.reg .pred p; setp.ne.s32 p, $5, 0; @p {store}}}"
        asm(b, VOID, text, "l,f,f,f,f,r,~{memory}", [address, *values, flag])
