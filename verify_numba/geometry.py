"""Shapes of one kernel variant: warps, tiles and the shared-memory map, as integers that tests can read without a GPU.

A block holds `rows` query rows. Keys come in tiles of `TILE` tokens. In the cluster form two blocks share every latent
row: each copies half of its columns, scores all rows over them and owns half of the output columns. The softmax of a
row is one block's work: the blocks take the row tiles in turns, get the other's part of their scores and send it the
weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from verify_numba.dims import D_QK, D_ROPE, D_V

TILE = 16
"""Tokens in a tile: the m16 side of one mma."""
WARP = 32
MMA_K = 16
MMA_N = 8
SM120_SHARED_BYTES = 101_376
"""Most dynamic shared memory of one block on compute capability 12.0."""
PARTNER_BUFFERS = 2
"""Tiles of scores that may be under way from the partner block. No credit goes back to it, yet nothing that it sends
overwrites what is still to be read: it sends tile t once its own softmax warps have read tile t - 1 of both blocks. So
this block's score warps have sent that tile, and, before that, this block's softmax warps have read tile t - 2, whose
buffer t takes. This needs rows of both blocks: two row tiles at least."""
WEIGHTS_AHEAD = 2
"""Tiles by which the softmax warps of a block may be ahead of its value warps."""
GROWTH = 8.0
"""How far, in log2, a score may exceed the running maximum before O is rescaled: weights stay below 2^8."""
COLUMN_GROUP = 32
"""Columns in one chunk of a partial result: two m16 tiles, of one value warp or of two neighbours."""


@dataclass(frozen=True)
class Geometry:
    """One kernel variant: `cluster` blocks a latent row (1 or 2), `n_tiles` groups of eight rows, `stages` tiles."""

    cluster: int
    n_tiles: int
    stages: int
    group_tiles: int = 3
    """n8 tiles of query rows that one score warp multiplies."""
    k_groups: int = 2
    """Score warps that share the columns of a group, since their queries must fit in registers. The softmax warps add
    up their parts."""
    softmax_warps: int = 1
    """Warps that take the block's own row tiles, in turns, from scores to weights."""
    copy_warps: int = 1
    """One, or two that take turns tile by tile."""
    value_warps: int = 8
    """Warps that accumulate O, each for all rows of the block and an equal share of its output columns, rounded up to
    whole m16 tiles."""
    lanes_arrive: bool = False
    """Whether every lane arrives at a barrier for itself, where otherwise one does for its warp: slower, but an order
    that compute-sanitizer's racecheck can follow, which does not see that a warp's barrier comes before the arrival."""
    key_chains: int = 1
    """Independent sums a row tile of scores: more hide the latency of an mma, and take registers."""

    @property
    def name(self) -> str:
        form = "cluster" if self.cluster == 2 else "single"
        return f"{form}{self.rows}{'_lanes_arrive' if self.lanes_arrive else ''}"

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
    def groups(self) -> int:
        """Groups of row tiles that share their score warps."""
        return self.n_tiles // self.group_tiles

    @property
    def own_tiles(self) -> int:
        """Row tiles that one block takes from scores to weights; the second block may have one fewer."""
        return -(-self.n_tiles // self.cluster)

    @property
    def softmax_stride(self) -> int:
        """From one row tile of a softmax warp to its next: warp w of block r has tiles r + cluster (w + warps n)."""
        return self.cluster * self.softmax_warps

    @property
    def softmax_tiles(self) -> int:
        """Row tiles of one softmax warp; of some warps, the last one does not exist."""
        return -(-self.n_tiles // self.softmax_stride)

    @property
    def weight_buffers(self) -> int:
        """Tiles of softmax weights between softmax warps and value warps.

        Without credits here too: the partner sends tile t once its own value warps are done with tile t -
        WEIGHTS_AHEAD. For that, this block's softmax warps have sent theirs, and before that this block's value warps
        were done with tile t - 2 WEIGHTS_AHEAD, whose buffer t takes.
        """
        return WEIGHTS_AHEAD * self.cluster

    @property
    def inverse_buffers(self) -> int:
        """Requests whose denominators may be under way to the value warps: as with the weights, and one ahead."""
        return self.cluster

    @property
    def score_warps(self) -> int:
        return self.groups * self.k_groups

    @property
    def warp_k_steps(self) -> int:
        """k-steps of mma that one score warp does a tile."""
        return self.k_steps // self.k_groups

    def arrivals(self, warps: int) -> int:
        """Arrivals that complete a phase of a barrier at which `warps` warps arrive."""
        return warps * (WARP if self.lanes_arrive else 1)

    @property
    def first_softmax_warp(self) -> int:
        return self.value_warps + self.score_warps

    @property
    def first_copy_warp(self) -> int:
        """Value warps come first, then score warps, softmax warps and copy warps."""
        return self.first_softmax_warp + self.softmax_warps

    @property
    def threads(self) -> int:
        return WARP * (self.first_copy_warp + self.copy_warps)

    @property
    def max_registers(self) -> int:
        """A quarter of a multiprocessor, with 16,384 registers, holds every fourth warp; they come in eights."""
        warps = -(-self.threads // (4 * WARP))
        return min(255, 16_384 // WARP // warps // 8 * 8)

    @property
    def m_tiles(self) -> int:
        """m16 tiles of output columns that one value warp multiplies; the last warp's may lie behind the end, in the
        rope columns: they are computed and dropped."""
        return -(-self.value_columns // (16 * self.value_warps))

    @property
    def uneven_columns(self) -> bool:
        return 16 * self.value_warps * self.m_tiles != self.value_columns

    @property
    def row_stride(self) -> int:
        """Bytes between two tokens of a stage: 16 bytes of padding keep ldmatrix free of bank conflicts."""
        return 2 * (self.value_columns + self.rope_columns) + 16

    @property
    def stage_bytes(self) -> int:
        return TILE * self.row_stride

    @property
    def weight_bytes(self) -> int:
        """One tile of bf16 softmax weights, [n_tiles, TILE, 8]."""
        return self.n_tiles * TILE * MMA_N * 2

    @property
    def score_bytes(self) -> int:
        """One tile of float32 scores of the block's own rows, [own_tiles, 32 lanes, 4]."""
        return self.own_tiles * TILE * MMA_N * 4

    @property
    def note_bytes(self) -> int:
        """A word from every lane of every softmax warp of the cluster: factors of its rows, and whether they differ
        from one (see `ptx.softmax`)."""
        return 4 * WARP * self.softmax_stride

    @cached_property
    def shared(self) -> SharedMap:
        return SharedMap.of(self)


@dataclass(frozen=True)
class SharedMap:
    """Byte offsets in dynamic shared memory. Barrier fields are the first of their ring, eight bytes each."""

    stage: int
    scores: int
    """[k_groups] parts of a tile of scores, from score warps to softmax warps."""
    partner: int
    """[PARTNER_BUFFERS, k_groups] parts: the partner block's."""
    weights: int
    """[weight_buffers]"""
    alpha: int
    """[weight_buffers] notes: what O is multiplied by before the tile is added."""
    inverse: int
    """[inverse_buffers] notes: one over the softmax denominators."""
    full: int
    empty: int
    weights_full: int
    """[weight_buffers]"""
    weights_empty: int
    """[WEIGHTS_AHEAD]"""
    inverse_full: int
    """[inverse_buffers]"""
    inverse_empty: int
    scores_full: int
    """[PARTNER_BUFFERS]"""
    scores_empty: int
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
            scores=take(g.k_groups * g.score_bytes, 128),
            partner=take(PARTNER_BUFFERS * g.k_groups * g.score_bytes if g.cluster == 2 else 0, 128),
            weights=take(g.weight_buffers * g.weight_bytes, 128),
            alpha=take(g.weight_buffers * g.note_bytes),
            inverse=take(g.inverse_buffers * g.note_bytes),
            full=take(8 * g.stages),
            empty=take(8 * g.stages, 8),
            weights_full=take(8 * g.weight_buffers, 8),
            weights_empty=take(8 * WEIGHTS_AHEAD, 8),
            inverse_full=take(8 * g.inverse_buffers, 8),
            inverse_empty=take(8, 8),
            scores_full=take(8 * PARTNER_BUFFERS, 8),
            scores_empty=take(8, 8),
            total=-(-offset // 16) * 16,
        )


CLUSTER_FORMS = (
    Geometry(cluster=2, n_tiles=2, stages=9, group_tiles=1, k_groups=1, copy_warps=2, key_chains=4),
    Geometry(cluster=2, n_tiles=3, stages=8, k_groups=3, softmax_warps=2),
    Geometry(cluster=2, n_tiles=6, stages=8, k_groups=1, softmax_warps=3, value_warps=6, key_chains=2),
    Geometry(cluster=2, n_tiles=9, stages=8, k_groups=1, softmax_warps=2, value_warps=6, key_chains=2),
)
"""From compute capability 9.0 on."""
SINGLE_FORMS = (
    Geometry(cluster=1, n_tiles=1, stages=5, group_tiles=1, k_groups=1, copy_warps=2, key_chains=4),
    Geometry(cluster=1, n_tiles=3, stages=4, softmax_warps=3, value_warps=6),
)
"""Without clusters, from compute capability 8.0 on."""
