"""What the machine reaches with somebody else's best kernels: read bandwidth and bf16 matrix rate, through torch."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from harness.work import Ceilings

READ_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
MATMUL_SIZE = {"cuda": 8192, "cpu": 512}
REPEATS = 10


def measure_ceilings(device: torch.device) -> Ceilings:
    """Best of several repeats of reductions and a copy (reading), and of a cuBLAS bf16 product (arithmetic)."""
    return Ceilings(read_bytes_per_s=_read_bandwidth(device), mma_flops_per_s=_matmul_rate(device))


def _read_bandwidth(device: torch.device) -> float:
    size = READ_BYTES[device.type]
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        size = min(size, free // 8)
    x = torch.ones(size // 4, dtype=torch.float32, device=device)
    half = x.numel() // 2
    ways: list[tuple[int, Callable[[], object]]] = [
        (size, lambda: x.sum()),
        (size, lambda: x.amax()),
        (
            2 * 4 * half,
            lambda: x[:half].copy_(x[half : 2 * half]),
        ),  # each byte is read once and written once
    ]
    return max(moved / _best_seconds(work, device) for moved, work in ways)


def _matmul_rate(device: torch.device) -> float:
    n = MATMUL_SIZE[device.type]
    a = torch.randn(n, n, device=device).bfloat16()
    b = torch.randn(n, n, device=device).bfloat16()
    return 2 * n**3 / _best_seconds(lambda: a @ b, device)


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    for _ in range(2):
        work()
    return min(_seconds(work, device) for _ in range(REPEATS))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3
