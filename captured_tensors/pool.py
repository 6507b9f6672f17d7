"""A small KV pool for a case: its rows at scattered slots, NaN everywhere else."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from captured_tensors.case import CaptureCase
from captured_tensors.schema import BF16, SINK, Array
from verify_numba.dims import D_QK

_MAX_GAP = 4
"""Longest distance kept between neighbouring slots; longer ones in the capture are shortened to it."""
_SPARE = 8
"""Least number of slots behind the last one in use, so that the smallest pool holds NaN rows too."""


class ScatteredPool(NamedTuple):
    """A pool, and the case's slot numbers in it."""

    kv_pool: Array
    """[slots, 1, 576] bf16; NaN in every slot that the case does not own."""
    kv_indices: Array
    """As the case's, same dtype and length; stale entries name slots that hold NaN."""
    out_cache_loc: Array
    """[N], as the case's, same dtype."""


def scatter_pool(
    case: CaptureCase, *, slots: int | None = None, permute_seed: int | None = None
) -> ScatteredPool:
    """Lay the case's rows out in a pool far smaller than the one they were captured from.

    Runs of neighbouring slots stay runs and their order stays; only long gaps shrink. Slot 0 stays the sink:
    it holds NaN unless the case itself uses it.

    Args:
        slots: size of the pool; by default at least twice what the case needs.
        permute_seed: move every row to another slot, at random over the whole pool.

    Raises:
        ValueError: ``slots`` is too small for the case's rows, the sink and one NaN slot.
    """
    used = int(case.kv_indptr[-1])
    owned = np.unique(np.concatenate([case.kv_indices[:used], case.out_cache_loc]).astype(np.int64))
    owned = owned[owned != SINK]
    target = _compact(owned, slots)
    size = slots if slots is not None else max(int(target.max(initial=0)), 2 * len(owned)) + 1 + _SPARE
    move = _permutation(size, permute_seed)

    kv_pool = np.full((size, 1, D_QK), np.nan, dtype=BF16)
    spots = np.concatenate([[SINK], move[target]])
    known = np.concatenate([[SINK], owned])

    def new_slot(old: Array) -> Array:
        return spots[np.searchsorted(known, old)]

    prefix_slots, draft_slots = new_slot(case.kv_indices[:used]), new_slot(case.out_cache_loc)
    kv_pool[prefix_slots] = case.prefix_rows
    kv_pool[draft_slots] = case.tail_rows

    free = np.setdiff1d(np.arange(1, size), spots)
    kv_indices = np.resize(free, len(case.kv_indices)).astype(case.kv_indices.dtype)
    kv_indices[:used] = prefix_slots
    return ScatteredPool(kv_pool, kv_indices, draft_slots.astype(case.out_cache_loc.dtype))


def _compact(owned: Array, slots: int | None) -> Array:
    """New slot numbers, from 1 up, for the sorted old ones."""
    if slots is not None and slots < len(owned) + 2:
        raise ValueError(
            f"slots: found {slots}, expected at least {len(owned) + 2} (rows, sink, one NaN slot)"
        )
    gaps = np.diff(owned, prepend=SINK)
    for longest in range(_MAX_GAP, 0, -1):
        target = np.cumsum(np.minimum(gaps, longest))
        if slots is None or len(target) == 0 or target[-1] + 1 < slots:
            break
    return target


def _permutation(size: int, seed: int | None) -> Array:
    """Slot to slot. With a seed one cycle through all slots but the sink, so that none stays in place."""
    move = np.arange(size)
    if seed is not None:
        order = np.random.default_rng(seed).permutation(move[1:])
        move[order] = np.roll(order, -1)
    return move
