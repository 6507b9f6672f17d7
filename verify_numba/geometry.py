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
EXCHANGE_BUFFERS = 4
"""Tiles of partial scores in flight between the two blocks of a cluster.

A score warp sends tile i + 1 before it receives tile i. When it sends tile m it has received tile m - 2, so the partner
has sent m - 2 and, before that, received m - 4: that buffer is free. Four are enough without any credit."""
KEPT_BUFFERS = 2
"""Tiles of a block's own partial scores: shared memory holds them until the partner's half is there, since registers are
full of queries and of the next tile's sums."""
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
    copy_warps: int = 2
    bulk: bool = False
    score_chains: int = 4

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
    def tiles_per_score_warp(self) -> int:
        """n8 tiles whose queries fit one warp's registers: 36 a tile in the cluster form, 72 in the single form."""
        return 2 if self.cluster == 2 and self.n_tiles > 1 else 1

    @property
    def score_warps(self) -> int:
        return -(-self.n_tiles // self.tiles_per_score_warp)

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
        """One tile of float32 partial scores, [n_tiles, 32 lanes, 4]."""
        return self.n_tiles * TILE * MMA_N * 4

    @cached_property
    def shared(self) -> SharedMap:
        return SharedMap.of(self)


@dataclass(frozen=True)
class SharedMap:
    """Byte offsets in dynamic shared memory. Barrier fields are the first of their ring, eight bytes each."""

    stage: int
    exchange: int
    kept: int
    weights: int
    alpha: int
    """[WEIGHT_BUFFERS, rows] float32: what O is multiplied by before the tile is added."""
    grew: int
    """[WEIGHT_BUFFERS, 8] int32, one a score warp: whether its alpha differs from one."""
    maxima: int
    """[score_warps, 8 * tiles_per_score_warp] float32: the running maxima, in base 2. In shared memory because a score
    warp's registers are full of queries."""
    inverse: int
    """[rows] float32: one over the softmax denominator."""
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

        exchange_buffers = EXCHANGE_BUFFERS if g.cluster == 2 else 0
        return SharedMap(
            stage=take(g.stages * g.stage_bytes, 128),
            exchange=take(exchange_buffers * g.exchange_bytes, 128),
            kept=take(KEPT_BUFFERS * g.exchange_bytes if g.cluster == 2 else 0, 128),
            weights=take(WEIGHT_BUFFERS * g.weight_bytes, 128),
            alpha=take(WEIGHT_BUFFERS * g.rows * 4),
            grew=take(WEIGHT_BUFFERS * 8 * 4),
            maxima=take(32 * g.score_warps * g.tiles_per_score_warp),
            inverse=take(g.rows * 4),
            full=take(8 * g.stages),
            empty=take(8 * g.stages, 8),
            weights_full=take(8 * WEIGHT_BUFFERS, 8),
            weights_empty=take(8 * WEIGHT_BUFFERS, 8),
            inverse_full=take(8, 8),
            inverse_empty=take(8, 8),
            exchange_full=take(8 * exchange_buffers * g.score_warps, 8),
            total=-(-offset // 16) * 16,
        )


CLUSTER_FORMS = tuple(Geometry(cluster=2, n_tiles=n, stages=s) for n, s in ((1, 9), (3, 9), (5, 8), (9, 7)))
"""From compute capability 9.0 on."""
SINGLE_FORMS = tuple(Geometry(cluster=1, n_tiles=n, stages=s) for n, s in ((1, 5), (3, 5), (5, 5)))
"""Without clusters, from compute capability 8.0 on."""
