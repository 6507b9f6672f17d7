"""Which score warp owns which row tile, as code on the LLVM builder.

Score warp `me` is in row group me // k_groups and multiplies column share me % k_groups of the group's tiles. The tiles
are dealt out in order: tile t of the group to column share t * k_groups // group_tiles. A warp's local tile j is row
tile (first + j) mod group_tiles of its group, `first` being the first one it owns, so its own tiles come first.
"""

from __future__ import annotations

from typing import Any

from verify_numba.geometry import Geometry
from verify_numba.ptx.asm import I32, integer


class Owner:
    def __init__(self, g: Geometry):
        self.k_groups, self.group_tiles, self.owned = g.k_groups, g.group_tiles, g.owned_tiles
        first = [-(-s * g.group_tiles // g.k_groups) for s in range(g.k_groups + 1)]
        self._first, self._counts = first[:-1], [hi - lo for lo, hi in zip(first, first[1:], strict=False)]

    def score_warp_of(self, row_tile: int) -> int:
        """The score warp that owns a row tile of the block."""
        group, t = divmod(row_tile, self.group_tiles)
        return group * self.k_groups + t * self.k_groups // self.group_tiles

    def _table(self, b: Any, index: Any, values: list[int]) -> Any:
        """values[index] by comparisons; the lists are as long as there are column shares."""
        out = integer(values[0])
        for i, value in enumerate(values[1:], 1):
            if value != values[0]:
                out = b.select(b.icmp_signed("==", index, integer(i)), integer(value), out)
        return out

    def k_group(self, b: Any, me: Any) -> Any:
        return b.urem(me, integer(self.k_groups))

    def _local(self, b: Any, me: Any, j: Any) -> Any:
        """Row tile within the group."""
        t = b.add(self._table(b, self.k_group(b, me), self._first), j)
        return b.select(b.icmp_signed(">=", t, integer(self.group_tiles)), b.sub(t, integer(self.group_tiles)), t)

    def tile(self, b: Any, me: Any, j: Any) -> Any:
        """Row tile of the block that is local tile j of this warp."""
        return b.add(b.mul(b.udiv(me, integer(self.k_groups)), integer(self.group_tiles)), self._local(b, me, j))

    def first_tile(self, b: Any, me: Any) -> Any:
        return self.tile(b, me, integer(0))

    def count(self, b: Any, me: Any) -> Any:
        return self._table(b, self.k_group(b, me), self._counts)

    def owns(self, b: Any, me: Any, j: int) -> Any | None:
        """None where every warp owns a local tile j, else a flag."""
        if j < min(self._counts):
            return None
        return b.zext(b.icmp_signed("<", integer(j), self.count(b, me)), I32)

    def owner_group(self, b: Any, me: Any, j: Any) -> Any:
        """Column share of the warp that owns local tile j."""
        t = self._local(b, me, j)
        return b.udiv(b.mul(t, integer(self.k_groups)), integer(self.group_tiles))

    def warp(self, b: Any, me: Any, j: Any) -> Any:
        """The score warp that owns local tile j."""
        return b.add(b.mul(b.udiv(me, integer(self.k_groups)), integer(self.k_groups)), self.owner_group(b, me, j))

    def neighbour(self, b: Any, me: Any, distance: int) -> Any:
        """The score warp `distance` column shares further on in the same row group."""
        share = b.urem(b.add(self.k_group(b, me), integer(distance)), integer(self.k_groups))
        return b.add(b.mul(b.udiv(me, integer(self.k_groups)), integer(self.k_groups)), share)
