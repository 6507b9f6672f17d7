"""What a rank publishes: the file by its counters, the metrics by their labels."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from sglang_glue.defrag.export import GAUGES, Exporter, flat, status_folder
from sglang_glue.defrag.model_pools import SortCounters
from sglang_glue.defrag.runs import BUCKETS, EMPTY, row_stats


def report() -> dict[str, Any]:
    import numpy as np

    return {
        "tier": "sort",
        "relocation": "off",
        "sorted_allocator": vars(SortCounters(allocs=3, frees=2)),
        "counters": {
            "relocations": 4,
            "bytes_moved": 5,
            "drains": 6,
            "longest_pause_ms": 1.5,
            "paused_ms": 9.5,
            "refused": {"busy": 2, "other": 1},
        },
        "live_runs": row_stats([np.array([1, 2, 3, 9])]).as_dict(),
        "free_runs": EMPTY.as_dict(),
    }


def test_the_file_is_whole_and_names_the_rank(tmp_path: Path) -> None:
    gone = tmp_path / "defrag-999999999.json"
    gone.write_text("{}")
    Exporter("1", tmp_path / "new").publish(report())
    Exporter("1", tmp_path).publish(report())
    written = json.loads((tmp_path / f"defrag-{os.getpid()}.json").read_text())
    assert written["rank"] == "1" and written["sorted_allocator"]["allocs"] == 3
    assert not gone.exists(), "files of processes that have ended are removed"
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == [f"defrag-{os.getpid()}.json"]


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    exporter = Exporter("0", tmp_path / "file")
    exporter.publish(report())
    exporter.publish(report())
    assert caplog.text.count("cannot be reported (logged once)") == 1


def test_every_gauge_gets_its_values() -> None:
    values = flat(report())
    assert {name for name, _ in values} == set(GAUGES)
    assert all(len(labels) == len(GAUGES[name][1]) for name, labels in values)
    assert values["run_length_mean", ("live",)] == 2.0
    assert values["runs", ("live", "1")] == 1 and values["runs", ("live", "2")] == 1
    assert len([k for k in values if k[0] == "runs"]) == 2 * len(BUCKETS)
    assert values["refused", ()] == 3 and values["relocation_drains", ()] == 6


def test_metrics_are_published_where_sglang_collects_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prometheus = pytest.importorskip(
        "prometheus_client", reason="needs prometheus_client, which SGLang brings"
    )
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    Exporter("7", tmp_path).publish(report())
    read = prometheus.REGISTRY.get_sample_value
    assert read("verify_numba:defrag_allocs", {"rank": "7"}) == 3
    assert read("verify_numba:defrag_run_length_mean", {"rank": "7", "slots": "live"}) == 2.0


def test_the_folder_is_the_one_of_the_counter_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDTREE_STATUS", "/somewhere")
    assert status_folder() == Path("/somewhere")
