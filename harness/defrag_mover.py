"""`defrag --mover`: what a relocation's copy costs on this machine's GPU.

Layer buffers as a server has them (61 layers of 1152-byte rows), random plans of several sizes and shapes. Each plan
is followed by its inverse, so every pass moves real rows; after the passes all rows must be back in place, and the
slots that were free hold the copies that the plan left there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from harness.errors import UsageError
from sglang_glue.defrag.mover import Pools, move_on_gpu, stage
from sglang_glue.defrag.plan import Plan, make_plan
from sglang_glue.defrag.runs import Slots

LAYERS = 61
ROW_BYTES = 1152
SLOTS = 65_536
REPEATS = 20
SCRATCH_BYTES, BUSY_COPIES = 1 << 29, 4
"""Copies that the GPU is busy with for about a millisecond."""


@dataclass(frozen=True)
class Timing:
    """One plan: microseconds of the copy on the GPU, and of the host's whole call, plan upload included; medians.

    ``gigabytes_per_second`` counts a moved byte once read and once written.
    """

    shape: str
    rows: int
    chains: int
    gpu_us: float
    host_us: float
    gigabytes_per_second: float
    right: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def plans() -> list[tuple[str, Plan]]:
    """Holes filled one by one, a stretch that slides by one slot, and slots that change places in cycles."""
    rng = np.random.default_rng(0)
    found = []
    for rows in (256, 1024, 4096):
        deal = rng.permutation(SLOTS - 1) + 1
        found.append(("to free slots", _plan(deal[:rows], deal[rows : 2 * rows], deal[rows:])))
    slide = np.arange(1, 257)
    found.append(("slide by one", _plan(slide, slide + 1, np.arange(257, SLOTS))))
    ring = rng.permutation(SLOTS - 1)[:1024] + 1
    found.append(
        (
            "cycles of 8",
            _plan(ring, np.roll(ring.reshape(-1, 8), 1, axis=1).reshape(-1), np.empty(0, np.int64)),
        )
    )
    return found


def time_mover() -> list[Timing]:
    """Time every plan. Raises UsageError on a machine without a CUDA GPU."""
    if not cuda.is_available():
        raise UsageError("--mover: needs an NVIDIA GPU, and none was found")
    rng = np.random.default_rng(1)
    content = rng.integers(0, 256, (SLOTS, ROW_BYTES), np.uint8)
    buffers = [cuda.to_device(content) for _ in range(LAYERS)]
    addresses = [b.device_ctypes_pointer.value for b in buffers]
    pools = Pools(np.array(addresses, np.int64), np.full(LAYERS, ROW_BYTES, np.int64), SLOTS)
    return [_time(shape, plan, pools, buffers, content) for shape, plan in plans()]


def _time(shape: str, plan: Plan, pools: Pools, buffers: Sequence[Any], content: NDArray[np.uint8]) -> Timing:
    back = inverse(plan, SLOTS - 1)
    move_on_gpu(pools, plan, 0)
    right = all(np.array_equal(_rows(b, plan.dst), content[plan.src]) for b in (buffers[0], buffers[-1]))
    move_on_gpu(pools, back, 0)
    gpu, host = [], []
    for _ in range(REPEATS):
        gpu.append(_on_gpu(pools, plan))
        move_on_gpu(pools, back, 0)
        cuda.synchronize()
        called = time.perf_counter()
        move_on_gpu(pools, plan, 0)
        host.append(time.perf_counter() - called)
        move_on_gpu(pools, back, 0)
    leave_copies(content, plan)
    right &= all(np.array_equal(b.copy_to_host(), content) for b in (buffers[0], buffers[-1]))
    seconds = float(np.median(gpu))
    bandwidth = 2e-9 * len(plan) * pools.slot_bytes / seconds
    return Timing(shape, len(plan), plan.chains, 1e6 * seconds, 1e6 * float(np.median(host)), bandwidth, right)


def inverse(plan: Plan, size: int) -> Plan:
    """The plan that brings every row of `plan` back; slots 1 to `size`."""
    return make_plan(plan.dst, plan.src, plan.free_after(np.setdiff1d(np.arange(1, size + 1), plan.src)), size)


def leave_copies(content: NDArray[np.uint8], plan: Plan) -> None:
    """Make of the rows before `plan` those after it and its inverse: what was free keeps the row moved there."""
    was_free = ~np.isin(plan.dst, plan.src)
    content[plan.dst[was_free]] = content[plan.src[was_free]]


def _on_gpu(pools: Pools, plan: Plan) -> float:
    """Seconds of one launch. The GPU is kept busy while the host launches, or the host's time would be measured."""
    launch, begin, end = stage(pools, plan, 0), cuda.event(), cuda.event()
    busy, spare = _scratch()
    for _ in range(BUSY_COPIES):
        busy.copy_to_device(spare)
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return 1e-3 * float(begin.elapsed_time(end))


@cache
def _scratch() -> tuple[Any, Any]:
    return cuda.device_array(SCRATCH_BYTES, np.uint8), cuda.device_array(SCRATCH_BYTES, np.uint8)


def _plan(src: Slots, dst: Slots, free: Slots) -> Plan:
    return make_plan(src, dst, free, SLOTS - 1)


def _rows(buffer: Any, slots: Slots) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = buffer.copy_to_host()[slots]
    return found


def print_timings(timings: Sequence[Timing], console: Console) -> None:
    """One line a plan."""
    table = Table(title=f"The mover: {LAYERS} layers of {ROW_BYTES}-byte rows, median of {REPEATS}")
    for name in ("plan", "rows", "chains", "GPU us", "host us", "GB/s", "rows right"):
        table.add_column(name, justify="left" if name == "plan" else "right")
    for t in timings:
        numbers = (
            str(t.rows),
            str(t.chains),
            f"{t.gpu_us:.0f}",
            f"{t.host_us:.0f}",
            f"{t.gigabytes_per_second:.0f}",
        )
        table.add_row(t.shape, *numbers, "yes" if t.right else "NO")
    console.print(table)
