"""Operations on a warp's tile as PTX; `verify_numba.lockstep` has the same ones in NumPy."""

from __future__ import annotations

from types import SimpleNamespace

from verify_numba.geometry import Geometry


def ptx_ops(g: Geometry) -> SimpleNamespace:
    """All operations of the verify kernel for one variant."""
    from verify_numba.ptx.control import control_ops
    from verify_numba.ptx.copying import copy_ops
    from verify_numba.ptx.scores import score_ops
    from verify_numba.ptx.softmax import softmax_ops
    from verify_numba.ptx.values import value_ops

    merged: dict[str, object] = {}
    for part in (control_ops(g), copy_ops(g), score_ops(g), softmax_ops(g), value_ops(g)):
        merged.update(vars(part))
    return SimpleNamespace(**merged)
