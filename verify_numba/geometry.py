"""Shapes of one kernel variant: warps, tiles and the shared-memory map, as integers that tests can read without a GPU.

A block holds `rows` query rows. Keys come in tiles of `TILE` tokens. In the cluster form two blocks share every latent
row: each copies half of its columns, adds the partner's partial scores to its own and owns half of the output columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from verify_numba.dims import D_QK, D_ROPE, D_V

TILE = 16
"""Tokens in a tile: the m16 side of one mma."""
WARP = 32
VALUE_WARPS = 8
"""Warps that accumulate O: each owns `D_V / cluster / 8` output columns for all rows of the block."""
MMA_K = 16
MMA_N = 8
SM120_SHARED_BYTES = 101_376
"""Most dynamic shared memory of one block on compute capability 12.0."""
EXCHANGE_BUFFERS = 2
"""Tiles of partial scores in flight between score warps.

Every score warp owns at least one row tile, and sends its part of tile i + 1 only after it has received tile i. So when
it sends tile i + 1, all that share its rows have sent tile i and, before that, read tile i - 1, whose buffer it uses."""
WEIGHT_BUFFERS = 2
"""Tiles of softmax weights between score warps and value warps."""
COLUMN_GROUP = 32
"""Columns in one chunk of a partial result: two m16 tiles of one value warp."""


@dataclass(frozen=True)
class Geometry:
    """One kernel variant: `cluster` blocks a latent row (1 or 2), `n_tiles` groups of eight query rows, `stages` tiles."""

    cluster: int
    n_tiles: int
    stages: int
    group_tiles: int = 3
    """n8 tiles of query rows that one score warp multiplies."""
    k_groups: int = 2
    """Score warps that share the columns of one group of row tiles: their queries must fit in registers. Each of them
    adds up the parts of the tiles that it owns, and takes these through the softmax."""
    copy_warps: int = 2
    bulk: bool = False
    chains: int = 1
    """Independent sums a row tile, so that an mma need not wait for the one before."""

    @property
    def name(self) -> str:
        return f"{'cluster' if self.cluster == 2 else 'single'}{self.rows}"

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return MMA_N * self.n_tiles

    @property
    def value_columns(self) -> int:
        return D_V // self.cluster

    @property
    def rope_columns(self) -> int:
        return D_ROPE // self.cluster

    @property
    def k_steps(self) -> int:
        return D_QK // self.cluster // MMA_K

    @property
    def score_warps(self) -> int:
        return self.n_tiles // self.group_tiles * self.k_groups

    @property
    def warp_k_steps(self) -> int:
        """k-steps of mma that one score warp does a tile."""
        return self.k_steps // self.k_groups

    @property
    def owned_tiles(self) -> int:
        """Row tiles that a score warp owns at most: with 3 tiles for 2 warps, the first owns two, the second one."""
        return -(-self.group_tiles // self.k_groups)

    @property
    def exchange_slots(self) -> int:
        """Parts of a row tile that its owner receives: from the other warps of its group, here and in the partner."""
        return self.k_groups - 1 + (self.k_groups if self.cluster == 2 else 0)

    @property
    def first_copy_warp(self) -> int:
        """Value warps come first, then score warps, then copy warps."""
        return VALUE_WARPS + self.score_warps

    @property
    def threads(self) -> int:
        return WARP * (self.first_copy_warp + self.copy_warps)

    @property
    def m_tiles(self) -> int:
        """m16 tiles of output columns that one value warp owns."""
        return self.value_columns // VALUE_WARPS // 16

    @property
    def row_stride(self) -> int:
        """Bytes between two tokens of a stage: 16 bytes of padding keep ldmatrix free of bank conflicts."""
        return 2 * (self.value_columns + self.rope_columns) + 16

    @property
    def stage_bytes(self) -> int:
        return TILE * self.row_stride

    @property
    def copy_bytes(self) -> int:
        """Bytes that arrive in one stage."""
        return TILE * 2 * (self.value_columns + self.rope_columns)

    @property
    def weight_bytes(self) -> int:
        """One tile of bf16 softmax weights, [n_tiles, TILE, 8]."""
        return self.n_tiles * TILE * MMA_N * 2

    @property
    def exchange_bytes(self) -> int:
        """One tile of float32 partial scores, [exchange_slots, n_tiles, 32 lanes, 4]."""
        return self.exchange_slots * self.n_tiles * TILE * MMA_N * 4

    @cached_property
    def shared(self) -> SharedMap:
        return SharedMap.of(self)


@dataclass(frozen=True)
class SharedMap:
    """Byte offsets in dynamic shared memory. Barrier fields are the first of their ring, eight bytes each."""

    stage: int
    exchange: int
    weights: int
    alpha: int
    """[WEIGHT_BUFFERS, rows] float32: what O is multiplied by before the tile is added."""
    grew: int
    """[WEIGHT_BUFFERS, 8] int32, one a score warp: whether its alpha differs from one."""
    maxima: int
    """[score_warps, 8 * owned_tiles] float32: the running maxima, in base 2. In shared memory because a score
    warp's registers are full of queries."""
    inverse: int
    """[rows] float32: one over the softmax denominator."""
    share: int
    """Four int32: the block's share of the key tiles."""
    full: int
    empty: int
    weights_full: int
    weights_empty: int
    inverse_full: int
    inverse_empty: int
    exchange_full: int
    """[EXCHANGE_BUFFERS, score_warps] barriers."""
    total: int

    @staticmethod
    def of(g: Geometry) -> SharedMap:
        offset = 0

        def take(nbytes: int, align: int = 16) -> int:
            nonlocal offset
            start = -(-offset // align) * align
            offset = start + nbytes
            return start

        return SharedMap(
            stage=take(g.stages * g.stage_bytes, 128),
            exchange=take(EXCHANGE_BUFFERS * g.exchange_bytes, 128),
            weights=take(WEIGHT_BUFFERS * g.weight_bytes, 128),
            alpha=take(WEIGHT_BUFFERS * g.rows * 4),
            grew=take(WEIGHT_BUFFERS * 8 * 4),
            maxima=take(32 * g.score_warps * g.owned_tiles),
            inverse=take(g.rows * 4),
            share=take(16),
            full=take(8 * g.stages),
            empty=take(8 * g.stages, 8),
            weights_full=take(8 * WEIGHT_BUFFERS, 8),
            weights_empty=take(8 * WEIGHT_BUFFERS, 8),
            inverse_full=take(8, 8),
            inverse_empty=take(8, 8),
            exchange_full=take(8 * EXCHANGE_BUFFERS * g.score_warps, 8),
            total=-(-offset // 16) * 16,
        )


CLUSTER_FORMS = (
    Geometry(cluster=2, n_tiles=1, stages=9, group_tiles=1, k_groups=1),
    Geometry(cluster=2, n_tiles=3, stages=9),
    Geometry(cluster=2, n_tiles=6, stages=8),
    Geometry(cluster=2, n_tiles=9, stages=7),
)
"""From compute capability 9.0 on."""
SINGLE_FORMS = (
    Geometry(cluster=1, n_tiles=1, stages=5, group_tiles=1, k_groups=1),
    Geometry(cluster=1, n_tiles=3, stages=4, k_groups=3),
    Geometry(cluster=1, n_tiles=6, stages=4, k_groups=3),
)
"""Without clusters, from compute capability 8.0 on."""
