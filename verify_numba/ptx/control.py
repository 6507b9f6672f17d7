"""Position, barriers and the division of the key tiles among workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from llvmlite import ir
from numba import cuda, types
from numba.cuda.extending import intrinsic

from verify_numba.geometry import PARTNER_BUFFERS, WARP, WEIGHTS_AHEAD, Geometry
from verify_numba.kernels.work import Share, make_walk
from verify_numba.ptx.asm import I32, VOID, asm, i32, i64, instruction, integer, lane_id, tile_op, void

device = cuda.jit(device=True, inline="always")

lane = tile_op(i32, [], lane_id)
load_s32 = instruction(i32, [i64], "ld.global.nc.b32 $0, [$1];", "=r,l")
load_s64 = instruction(i64, [i64], "ld.global.nc.b64 $0, [$1];", "=l,l")
shuffle = instruction(i32, [i32, i32], "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=r,r,r")
shuffle_up = instruction(
    i32, [i32, i32],
    "{.reg .pred p; .reg .b32 t; shfl.sync.up.b32 t|p, $1, $2, 0, -1; @!p mov.b32 t, 0; mov.b32 $0, t;}", "=r,r,r",
)  # fmt: skip
"""The value `distance` lanes below, 0 where there is none."""
count_lanes = instruction(
    i32, [i32],
    "{.reg .pred p; .reg .b32 t; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 t, p, -1; popc.b32 $0, t;}", "=r,r",
)  # fmt: skip
cluster_rank = instruction(i32, [], "mov.u32 $0, %cluster_ctarank;", "=r", volatile=False)
quotient = tile_op(i32, [i32, i32], lambda b, x, y: b.udiv(x, y))
"""x // y of non-negative 32-bit integers; Numba's own operators work in 64 bits."""
remainder = tile_op(i32, [i32, i32], lambda b, x, y: b.urem(x, y))


@intrinsic
def shared_base(typing_context):
    """Address of dynamic shared memory in the shared window."""

    def codegen(context, b, signature, args):
        name = "verify_numba_dynamic_shared"
        module = b.module
        if name in module.globals:
            array = module.globals[name]
        else:
            array = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), 0), name, addrspace=3)
            array.linkage = "external"
            array.align = 128
        return b.ptrtoint(array, I32)

    return i32(), codegen


@device
def kept_base():
    # The shuffle keeps the address in a register; the compiler would read the block's rank anew at every use.
    return shuffle(shared_base(), 0)


@device
def warp_id():
    # The shuffle tells the compiler that the value is the same for the whole warp.
    return shuffle(types.int32(cuda.threadIdx.x) >> 5, 0)


@device
def load_index(pointer, i, wide):
    if wide:
        return load_s64(pointer + 8 * types.int64(i))
    return types.int64(load_s32(pointer + 4 * types.int64(i)))


@device
def load_count(pointer, i, wide):
    """Element i of an index array whose numbers fit 31 bits: the low word, without a branch that would wait for it."""
    size = i64(4)
    if wide:
        size = i64(8)
    return load_s32(pointer + size * i)


_request, _, _ = make_walk(SimpleNamespace(device=device, i32=i32, load_count=load_count))


@device
def tiles_of(batch, b):
    """Tiles of request b; lanes may ask for different requests."""
    return _request(batch, b).tiles


@device
def running_total(x):
    """Inclusive sum over the lanes."""
    me = lane()
    for step in (1, 2, 4, 8, 16):
        below = shuffle_up(x, step)
        if me >= step:
            x = i32(x + below)
    return x


@device
def chunk_tiles(batch, first):
    """Lane l: tiles of requests first .. first + l."""
    mine = i32(0)
    if first + lane() < batch.bs:
        mine = tiles_of(batch, first + lane())
    return running_total(mine)


@device
def all_tiles(batch):
    total = i32(0)
    for first in range(0, batch.bs, 32):
        total = i32(total + shuffle(chunk_tiles(batch, first), 31))
    return total


@device
def quota_of(batch, total, workers):
    return i32(max(batch.min_tiles, quotient(i32(total + (workers - 1)), workers)))


@device
def first_share(batch, worker, workers):
    # Up to 32 requests, what the sum is made of is also where the worker's first request is found.
    upto = chunk_tiles(batch, 0)
    total = shuffle(upto, 31)
    if batch.bs > 32:
        total = all_tiles(batch)
    quota = quota_of(batch, total, workers)
    begin = i32(min(total, worker * quota))
    end = i32(min(total, begin + quota))
    b, start, going = i32(0), i32(0), i32(1)
    while going:
        if b > 0:
            upto = chunk_tiles(batch, b)
        done = i32(0)
        if b + lane() < batch.bs and start + upto <= begin:
            done = i32(1)
        done = count_lanes(done)
        if done > 0:
            start = i32(start + shuffle(upto, i32(done - 1)))
        b = i32(b + done)
        if done < 32:
            going = i32(0)
    return Share(b, start, begin, end)


@device
def request_span(batch, b, workers):
    upto = chunk_tiles(batch, 0)
    total = shuffle(upto, 31)
    if batch.bs > 32:
        total = all_tiles(batch)
    end = i32(0)
    for first in range(0, b + 1, 32):
        if first > 0:
            upto = chunk_tiles(batch, first)
        end = i32(end + shuffle(upto, i32(min(b - first, 31))))
    tiles, quota = tiles_of(batch, b), quota_of(batch, total, workers)
    first_worker, count = i32(0), i32(0)
    if tiles > 0:
        first_worker = quotient(i32(end - tiles), quota)
        count = i32(quotient(i32(end - 1), quota) - first_worker + 1)
    return first_worker, count


def _init(b: Any, address: Any, offset: int, n: int, arrivals: int) -> None:
    """n barriers in a row, initialised by a lane each."""
    text = f"{{.reg .pred p; setp.lt.s32 p, $1, {n}; @p mbarrier.init.shared.b64 [$0+{offset}], {arrivals};}}"
    asm(b, VOID, text, "r,r,~{memory}", [b.add(address, b.mul(lane_id(b), integer(8))), lane_id(b)])


def arrive_warp(b: Any, bar: Any) -> None:
    """One arrival, for all that the warp has done so far."""
    text = (
        "{.reg .pred p; .reg .b64 s; bar.warp.sync -1; setp.eq.s32 p, $1, 0; @p mbarrier.arrive.shared.b64 s, [$0];}"
    )
    asm(b, VOID, text, "r,r,~{memory}", [bar, lane_id(b)])


def arrive_lanes(b: Any, bar: Any) -> None:
    """32 arrivals, each for what its lane has done so far."""
    asm(b, VOID, "{.reg .b64 s; mbarrier.arrive.shared.b64 s, [$0];}", "r,~{memory}", [bar])


def arrive_expecting_bytes(b: Any, bar: Any, nbytes: Any, lanes_arrive: bool) -> None:
    """The same, where bytes are on their way too: the phase is not over before they are here."""
    first = "mbarrier.arrive.expect_tx.shared.b64 s, [$0], $1;"
    rest = "@!p mbarrier.arrive.shared.b64 s, [$0];" if lanes_arrive else ""
    text = f"{{.reg .pred p; .reg .b64 s; bar.warp.sync -1; setp.eq.s32 p, $2, 0; @p {first} {rest}}}"
    asm(b, VOID, text, "r,r,r,~{memory}", [bar, nbytes, lane_id(b)])


def try_wait(clustered: bool) -> str:
    """The cluster form needs compute capability 9.0, where a wait can suspend the warp; the single form needs 8.0."""
    return "mbarrier.try_wait.parity.shared::cta" if clustered else "mbarrier.test_wait.parity.shared"


def spin(b: Any, bar: Any, parity: Any, poll: str, then: str = "") -> None:
    text = f"{{.reg .pred p; AGAIN: {poll}.b64 p, [$0], $1; @p bra DONE; bra AGAIN; DONE: {then}}}"
    asm(b, VOID, text, "r,r,~{memory}", [bar, parity])


def control_ops(g: Geometry) -> SimpleNamespace:
    at, clustered = g.shared, g.cluster == 2

    def init_body(b: Any, base: Any) -> None:
        _init(b, base, at.full, g.stages, WARP)  # every lane of the warp that copies a tile
        _init(b, base, at.empty, g.stages, g.arrivals(g.value_warps))
        _init(b, base, at.scores_full, PARTNER_BUFFERS, g.arrivals(g.score_warps) + clustered)
        _init(b, base, at.scores_empty, 1, g.arrivals(g.softmax_warps))
        _init(b, base, at.weights_full, g.weight_buffers, g.arrivals(g.softmax_warps))
        _init(b, base, at.weights_empty, WEIGHTS_AHEAD, g.arrivals(g.value_warps))
        _init(b, base, at.inverse_full, g.inverse_buffers, g.arrivals(g.softmax_warps))
        _init(b, base, at.inverse_empty, 1, g.arrivals(g.value_warps))
        if clustered:
            asm(b, VOID, "fence.mbarrier_init.release.cluster;", "~{memory}", [])
        asm(b, VOID, "bar.warp.sync -1;", "~{memory}", [])

    arrive_body = arrive_lanes if g.lanes_arrive else arrive_warp
    arrive = tile_op(void, [i32], arrive_body)

    def arrive_expecting_body(b: Any, bar: Any, nbytes: Any) -> None:
        if clustered:
            arrive_expecting_bytes(b, bar, nbytes, g.lanes_arrive)
        else:
            arrive_body(b, bar)

    def reach_body(b: Any, base: Any, rank: Any) -> Any:
        return b.sub(asm(b, I32, "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", [base, rank]), base)

    wait = tile_op(void, [i32, i32], lambda b, bar, parity: spin(b, bar, parity, try_wait(clustered)))
    # What the partner block sends needs an acquire of cluster scope. A fence restricted to shared memory gives it
    # without the cache invalidation that an unrestricted one compiles to.
    wait_partner = tile_op(
        void, [i32, i32],
        lambda b, bar, parity: spin(b, bar, parity, "mbarrier.try_wait.parity.relaxed.cluster.shared::cta",
                                    "fence.acquire.sync_restrict::shared::cluster.cluster;"),
    )  # fmt: skip

    if clustered:
        announce_text = "bar.warp.sync -1; barrier.cluster.arrive.release.aligned;"
        start_text = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;"
        settle_text = "bar.warp.sync -1; barrier.cluster.wait.acquire.aligned;"
    else:
        announce_text = f"bar.arrive 0, {g.threads};"
        start_text = f"bar.sync 0, {g.threads};"
        settle_text = ""

    def blank_or(text: str) -> Any:
        return instruction(void, [], text, "~{memory}")

    @device
    def cluster_id():
        return i32(i32(cuda.blockIdx.x) // g_cluster)

    @device
    def cluster_count():
        return i32(i32(cuda.gridDim.x) // g_cluster)

    @device
    def no_rank():
        return i32(0)

    g_cluster = g.cluster
    return SimpleNamespace(
        device=device, i32=i32, warp_id=warp_id, shared_base=kept_base, load_index=load_index, load_count=load_count,
        first_share=first_share, cluster_id=cluster_id, cluster_count=cluster_count,
        cluster_rank=cluster_rank if clustered else no_rank, row_block=row_block, row_blocks=row_blocks,
        init_barriers=tile_op(void, [i32], init_body), arrive=arrive, wait=wait,
        arrive_expecting=tile_op(void, [i32, i32], arrive_expecting_body),
        # From an address in shared memory to the same in that of a block of the cluster.
        reach=tile_op(i32, [i32, i32], reach_body if clustered else lambda b, base, rank: integer(0)),
        wait_cluster=wait_partner if clustered else wait,
        announce=blank_or(announce_text), await_start=blank_or(start_text), settle=blank_or(settle_text),
        # The next kernel may be set up from now on; it waits for this one's end before it reads results.
        release_next=blank_or("griddepcontrol.launch_dependents;" if clustered else ""),
    )  # fmt: skip


@device
def row_block():
    return i32(cuda.blockIdx.y)


@device
def row_blocks():
    return i32(cuda.gridDim.y)


@device
def block_x():
    return i32(cuda.blockIdx.x)
