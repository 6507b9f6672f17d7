"""Which row tiles a score warp multiplies and which of them it owns, that is, takes through the softmax.

Score warp `me` is in row group `me // k_groups` and multiplies the group's tiles over column share
`me % k_groups`. The tiles are dealt out in order to the warps of the group; a warp's own come first.
"""

from __future__ import annotations

from functools import cache

from verify_numba.geometry import Geometry


@cache
def owner_of(g: Geometry, row_tile: int) -> int:
    """The score warp that owns a row tile of the block."""
    group, t = divmod(row_tile, g.group_tiles)
    return group * g.k_groups + t * g.k_groups // g.group_tiles


@cache
def my_tiles(g: Geometry, me: int) -> tuple[int, ...]:
    """The row tiles that warp `me` multiplies, its own ones first, in the order of its products."""
    tiles = range(me // g.k_groups * g.group_tiles, (me // g.k_groups + 1) * g.group_tiles)
    first = next(t for t in tiles if owner_of(g, t) == me)
    return (*range(first, tiles.stop), *range(tiles.start, first))


@cache
def owned_count(g: Geometry, me: int) -> int:
    """How many row tiles warp `me` owns; they stand next to one another."""
    return sum(owner_of(g, tile) == me for tile in my_tiles(g, me))
