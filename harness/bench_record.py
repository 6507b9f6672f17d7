"""A measured shape as a line to read and as a record for the result file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.bench_inputs import Workload
from harness.bench_measure import Entry
from harness.work import Ceilings, count_work, floor

Record = dict[str, Any]


def make_record(work: Workload, ours: Entry, peers: Sequence[Entry], ceilings: Ceilings, mode: str) -> Record:
    """One of our variants on one shape, with the peers beside it."""
    shape = work.shape
    counted = count_work(shape.lengths, shape.T, shape.H, work.tail_cells)
    least = floor(counted, ceilings)
    record: Record = {
        "H": shape.H,
        "T": shape.T,
        "bs": shape.bs,
        "lengths": list(shape.lengths),
        "slots": shape.slots,
        "run_length": shape.run_length,
        "mode": mode,
        "nsplit": ours.variant.nsplit if ours.variant else None,
        "form": ours.variant.form if ours.variant else "auto",
        "plan": ours.plan,
        "slot_sets": work.n_sets,
        "cold_bytes": work.cold_bytes,
        "bytes": counted.bytes,
        "flops": counted.flops,
        "floor_bytes_us": least.bytes_us,
        "floor_flops_us": least.flops_us,
        "bound": least.bound,
        **_outcome(ours),
        "peers": {},
    }
    if ours.timing:
        us = ours.timing.us
        record |= {
            "gbps": counted.gbps(us),
            "tflops": counted.tflops(us),
            "percent_of_floor": least.percent(us),
        }
        record["peers"] = {peer.name: _peer(peer, us) for peer in peers}
    return record


def header_line(record: Record, label: str) -> str:
    """What the shape is, in fixed columns."""
    split = "auto" if record["nsplit"] is None else str(record["nsplit"])
    form = "" if record["form"] == "auto" else f" {record['form']}"
    return (
        f"H {record['H']:3d}  T {record['T']:2d}  bs {record['bs']:2d}  L {label:>14s}  "
        f"{record['slots']:10s} {record['mode']:5s} nsplit {split}{form}"
    )


def line(record: Record, label: str) -> str:
    """One line: time, rates, share of the floor, ratio to each peer."""
    head = header_line(record, label)
    if record.get("error"):
        return f"{head} | not run: {record['error']}"
    if "us" not in record:
        return f"{head} | RED, not timed: {record['check_text']}"
    parts = [
        f"{head} | {record['us']:9.1f} us (spread {record['spread_percent']:.1f}%)",
        f"{record['gbps']:6.0f} GB/s  {record['tflops']:6.1f} TFLOP/s",
        f"{record['percent_of_floor']:5.1f}% of the {record['bound']} floor",
        *(_peer_text(name, peer) for name, peer in record["peers"].items()),
    ]
    return " | ".join(parts)


def _peer_text(name: str, peer: Record) -> str:
    if peer.get("error"):
        return f"{name}: {peer['error']}"
    if "us" not in peer:
        return f"{name}: wrong, not timed ({peer['check_text']})"
    notes = f" [{peer['note']}]" if peer["note"] else ""
    return f"{name} {peer['us']:.1f} us, x{peer['ratio']:.2f}{notes}"


def _peer(entry: Entry, our_us: float) -> Record:
    record = {"note": entry.note, **_outcome(entry)}
    if entry.timing:
        record["ratio"] = entry.timing.us / our_us
    return record


def _outcome(entry: Entry) -> Record:
    record: Record = {}
    if entry.error:
        record["error"] = entry.error
    if entry.check:
        record |= {"check": entry.check.as_json(), "check_text": str(entry.check)}
    if entry.timing and not entry.error:
        record |= {
            "us": entry.timing.us,
            "us_passes": entry.timing.medians,
            "spread_percent": entry.timing.spread_percent,
            "samples": sum(len(samples) for samples in entry.timing.passes),
            "timed_by": entry.timing.mode,
        }
    return record
