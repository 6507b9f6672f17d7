"""Kernels that do one operation of the exchange each, as PTX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda
from ptx_lanes import WORD

from verify_numba.geometry import Geometry
from verify_numba.gpu.spec import CLUSTER_MIN_CC


@functools.cache
def compiled(g: Geometry, name: str) -> str:
    """PTX of a kernel that does one thing; see `KERNELS`."""
    from numba import types

    from verify_numba.ptx import ptx_ops

    i32, f32 = types.int32, types.float32
    kernel, tile, integers = KERNELS[name](ptx_ops(g), g)
    signature = (*([types.UniTuple(f32, tile)] if tile else []), *[i32] * integers)
    cc = CLUSTER_MIN_CC if g.cluster == 2 else (8, 0)
    ptx, _ = cuda.compile(kernel, signature, cc=cc, output="ptx", device=False, abi="numba")
    return ptx if isinstance(ptx, str) else ptx.decode()


def _note(ops: Any, g: Geometry) -> tuple[Callable[..., None], int, int]:
    post_note = ops.post_note

    def kernel(factors, note, flag, my_tile, bar, reach):
        post_note(note, factors, flag, my_tile, bar, reach)

    return kernel, 2 * g.softmax_tiles, 5


def _weights(ops: Any, g: Geometry) -> tuple[Callable[..., None], int, int]:
    post_weights = ops.post_weights

    def kernel(p, place, my_tile, bar, reach):
        post_weights(place, p, my_tile, bar, reach)

    return kernel, 4 * g.softmax_tiles, 4


def _expected(ops: Any, g: Geometry) -> tuple[Callable[..., None], int, int]:
    weights_from_partner, arrive_expecting = ops.weights_from_partner, ops.arrive_expecting

    def kernel(bar, me, rank):
        arrive_expecting(bar, weights_from_partner(me, rank))

    return kernel, 0, 3


def _deliver(own_parity: int) -> Any:
    def make(ops: Any, g: Geometry) -> tuple[Callable[..., None], int, int]:
        deliver = ops.deliver_odd if own_parity else ops.deliver_even

        def kernel(products, own, partner, bar, first_tile):
            deliver(products, own, partner, bar, first_tile)

        return kernel, 4 * g.group_tiles, 4

    return make


def _arm(ops: Any, g: Geometry) -> tuple[Callable[..., None], int, int]:
    arm_scores = ops.arm_scores

    def kernel(bar, me, rank):
        arm_scores(bar, me, rank)

    return kernel, 0, 3


def _gather(ops: Any, g: Geometry) -> tuple[Callable[..., None], int, int]:
    """The scores that are gathered, posted as if they were weights."""
    gather_scores, post_weights = ops.gather_scores, ops.post_weights

    def kernel(scores, partner, me, rank, place, my_tile, bar, reach):
        post_weights(place, gather_scores(scores, partner, me, rank), my_tile, bar, reach)

    return kernel, 0, 8


def _grew(ops: Any, g: Geometry) -> tuple[Callable[..., None], int, int]:
    any_grew, arrive_expecting = ops.any_grew, ops.arrive_expecting

    def kernel(note, bar):
        arrive_expecting(bar, any_grew(note))

    return kernel, 0, 2


def _scale(ops: Any, g: Geometry) -> tuple[Callable[..., None], int, int]:
    """O times the factors of a note, each register of a lane at its place."""
    from verify_numba.ptx.asm import f32, i32, integer, lane_id, store_shared, tile, tile_op, unpack, void

    size = 4 * g.m_tiles * g.n_tiles

    def store_body(b: Any, place: Any, o: Any) -> None:
        at = b.add(place, b.mul(lane_id(b), integer(WORD * size)))
        for i, value in enumerate(unpack(b, o, size)):
            store_shared(b, at, WORD * i, [value])

    scale_o, store = ops.scale_o, tile_op(void, [i32, tile(f32, size)], store_body)

    def kernel(o, note, place):
        store(place, scale_o(o, note))

    return kernel, size, 2


KERNELS = {
    "note": _note, "grew": _grew, "scale": _scale, "weights": _weights, "expected": _expected,
    "deliver_even": _deliver(0), "deliver_odd": _deliver(1), "arm": _arm, "gather": _gather,
}  # fmt: skip
