"""Made-up result files for tests of the report: shaped like real ones, their numbers come from no machine."""

from __future__ import annotations

from typing import Any

from harness.work import Ceilings, count_work, floor

CEILINGS = Ceilings(read_bytes_per_s=4e12, mma_flops_per_s=7e14)
PEER_COST = {"sglang-triton": (80.0, 190e-3), "flashmla": (22.0, 0.45e-3), "flashinfer-fa2": (27.0, 1.1e-3)}
MASKS = {"sglang-triton": "tree", "flashmla": "chain", "flashinfer-fa2": "chain"}


def bench_record(L: int, H: int = 8, **over: Any) -> dict[str, Any]:
    work = count_work([L], 9, H, 45)
    least = floor(work, CEILINGS)
    us = over.pop("us", 9.0 + 2.2 * least.us)
    peers = {
        name: {"us": a + b * L, "ratio": (a + b * L) / us, "note": "", "mask": MASKS[name]}
        for name, (a, b) in PEER_COST.items()
    }
    check = {"rel_norm": 1.7e-3, "worst_row": 2.6e-3, "lse": 2e-5, "green": True}
    return {
        "H": H,
        "T": 9,
        "bs": 1,
        "lengths": [L],
        "slots": "scattered",
        "run_length": 1,
        "mode": "graph",
        "nsplit": None,
        "form": "auto",
        "bytes": work.bytes,
        "flops": work.flops,
        "us": us,
        "floor_bytes_us": least.bytes_us,
        "floor_flops_us": least.flops_us,
        "spread_percent": 0.5,
        "gbps": work.gbps(us),
        "tflops": work.tflops(us),
        "percent_of_floor": least.percent(us),
        "check": {**check, "rel_norm_limit": 3.6e-3, "worst_row_limit": 5e-3},
        "peers": peers,
        **over,
    }


def bench_result(*records: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": "verify-numba-bench/1",
        "command": "python -m harness bench --preset lengths",
        "commit": "0123abcd",
        "started": "2000-01-01T00:00:00+00:00",
        "machine": {"gpu": "Imaginary GPU"},
        "versions": {"torch": "9.9", "sglang": None},
        "ceilings": {
            "read_bytes_per_s": CEILINGS.read_bytes_per_s,
            "mma_flops_per_s": CEILINGS.mma_flops_per_s,
        },
        "peers": {"flashmla": {"missing": None}, "torch": {"missing": "not asked for <here>"}},
        "complete": True,
        "results": list(records),
    }


def full_bench_result() -> dict[str, Any]:
    lengths = [bench_record(L) for L in (0, 256, 1024, 4096, 16384, 65536, 131072, 185000)]
    splits = [bench_record(65536, nsplit=n, us=50 + abs(n - 66) ** 1.5 / 5) for n in (16, 33, 66, 132)]
    runs = {1: "scattered", 4: "runs of 4", 64: "runs of 64", 0: "contiguous"}
    slots = [
        bench_record(
            L, H=16, run_length=run, slots=name, us=L / 800 * (1 + 0.05 * (run == 1) + 0.02 * (run == 4))
        )
        for L in (16384, 65536)
        for run, name in runs.items()
    ]
    return bench_result(*lengths, *splits, *slots)


def context_result(label: str, slope: float) -> dict[str, Any]:
    rows = [
        {
            "context": n,
            "decode_tokens_per_s": 1 / (0.004 + slope * n),
            "prefill_tokens_per_s": 9000.0,
            "accept_length": 2.4,
            "gpu_percent": 98.0,
            "memory_percent": 70.0 / (1 + n * slope * 90),
            "power_w": 300.0 + 200 / (1 + n * slope * 50),
        }
        for n in (1024, 4096, 16384, 65536)
    ]
    return {"schema": "verify-numba-context/1", "label": label, "complete": True, "results": rows}
