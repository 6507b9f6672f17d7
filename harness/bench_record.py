"""A measured shape as a line to read and as a record for the result file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.bench_entry import Entry
from harness.bench_inputs import Coldness, random_trees
from harness.bench_shapes import BenchShape
from harness.work import Ceilings, Floor, Work, count_work, floor

Record = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One shape in one mode, with what it costs at least on the machine."""

    shape: BenchShape
    mode: str
    cold: Coldness
    work: Work
    floor: Floor

    @staticmethod
    def of(shape: BenchShape, mode: str, cold: Coldness, seed: int, ceilings: Ceilings) -> Task:
        cells = int(random_trees(shape.bs, shape.T, seed).sum())
        work = count_work(shape.lengths, shape.T, shape.H, cells)
        return Task(shape, mode, cold, work, floor(work, ceilings))


def make_record(task: Task, ours: Entry, peers: Sequence[Entry]) -> Record:
    """One of our variants on one shape, with the peers beside it."""
    shape = task.shape
    record: Record = {
        "H": shape.H,
        "T": shape.T,
        "bs": shape.bs,
        "lengths": list(shape.lengths),
        "slots": shape.slots,
        "run_length": shape.run_length,
        "mode": task.mode,
        "nsplit": ours.variant.nsplit,
        "form": ours.variant.form,
        "plan": ours.plan,
        "slot_sets": task.cold.sets(shape),
        "cold_bytes": task.cold.bytes_between(shape),
        "bytes": task.work.bytes,
        "flops": task.work.flops,
        "floor_bytes_us": task.floor.bytes_us,
        "floor_flops_us": task.floor.flops_us,
        "bound": task.floor.bound,
        **_outcome(ours),
        "peers": {},
    }
    if "us" in record:
        us = record["us"]
        record |= {
            "gbps": task.work.gbps(us),
            "tflops": task.work.tflops(us),
            "percent_of_floor": task.floor.percent(us),
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
    record = {"note": entry.note, "mask": entry.mask, **_outcome(entry)}
    if "us" in record:
        record["ratio"] = record["us"] / our_us
    return record


def _outcome(entry: Entry) -> Record:
    record: Record = {}
    if entry.error:
        record["error"] = entry.error
    if entry.check:
        record |= {
            "check": {key: value for key, value in entry.check.items() if key != "text"},
            "check_text": entry.check["text"],
        }
    if entry.timing and entry.timed:
        record |= {
            "us": entry.timing.us,
            "us_passes": entry.timing.medians,
            "spread_percent": entry.timing.spread_percent,
            "samples": sum(len(samples) for samples in entry.timing.passes),
            "timed_by": entry.timing.mode,
        }
    return record
