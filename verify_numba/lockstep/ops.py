"""Every operation of the kernels in NumPy, on a whole warp's tile at a time."""

from __future__ import annotations

from types import SimpleNamespace

from verify_numba.geometry import Geometry
from verify_numba.lockstep.control_ops import barrier_ops, place_ops
from verify_numba.lockstep.copy_ops import copy_ops
from verify_numba.lockstep.exchange_ops import exchange_ops
from verify_numba.lockstep.merge_ops import merge_ops
from verify_numba.lockstep.score_ops import mask_ops, score_ops
from verify_numba.lockstep.softmax_ops import softmax_ops
from verify_numba.lockstep.value_ops import value_ops
from verify_numba.lockstep.work_ops import work_ops


def numpy_ops(g: Geometry) -> SimpleNamespace:
    """The operations of variant `g` for kernels that `run_kernel` runs.

    What is uniform in a warp is an int; a tile is an array in its natural order, rows or tokens first. An
    address in shared memory is a byte offset in the block's own.
    """
    return SimpleNamespace(
        **place_ops(g),
        **work_ops(),
        **barrier_ops(g),
        **copy_ops(g),
        **score_ops(g),
        **mask_ops(g),
        **exchange_ops(g),
        **softmax_ops(g),
        **value_ops(g),
        **merge_ops(),
    )
