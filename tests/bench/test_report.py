import base64
import json
import re

import pytest

from harness.cli import main
from harness.report_load import load_results
from harness.report_page import page
from harness.report_plots import bench_pictures
from harness.report_style import OURS, in_order, short
from tests.bench.results import bench_record, bench_result, context_result, full_bench_result

PNG = b"\x89PNG\r\n\x1a\n"


def write(path, value):
    path.write_text(json.dumps(value))
    return str(path)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Folder with one whole report."""
    folder = tmp_path_factory.mktemp("report")
    files = {
        "bench": full_bench_result(),
        "off": context_result("off", 1e-5),
        "on": context_result("on", 3e-7),
    }
    paths = [write(folder / f"{name}.json", value) for name, value in files.items()]
    assert main(["report", *paths, "--out", str(folder / "out")]) == 0
    return folder / "out"


def test_pictures(report):
    names = {path.name for path in report.iterdir()}
    for stem in (
        "main",
        "time-",
        "bandwidth-",
        "speedup-",
        "error-",
        "splits",
        "slots",
        "decode-speed",
        "decode-gpu",
    ):
        assert any(name.startswith(stem) and name.endswith(".png") for name in names), stem
    for path in report.glob("*.png"):
        assert path.read_bytes().startswith(PNG)


def test_the_page_needs_no_other_file(report):
    html = (report / "index.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert len(sources) == len(list(report.glob("*.png")))
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert base64.b64decode(sources[0].split(",")[1]).startswith(PNG)
    assert "@import" not in html and "url(" not in html


def test_the_page_says_where_figures_come_from(report):
    html = (report / "index.html").read_text()
    for text in ("python -m harness bench --preset lengths", "0123abcd", "Imaginary GPU", "torch 9.9"):
        assert text in html
    assert "not asked for &lt;here&gt;" in html and "<here>" not in html


def test_the_first_picture_is_time_with_peers_and_floors(tmp_path):
    (file,) = load_results([write(tmp_path / "bench.json", full_bench_result())])
    picture = next(bench_pictures(file))
    axes, bandwidth = picture.figure.axes
    assert picture.name == "main" and bandwidth.get_ylabel() == "GB/s"
    labels = [line.get_label() for line in axes.get_lines()]
    assert labels[0] == OURS and "floor: bytes" in labels
    assert "sglang-triton" in labels and "flashmla (chain mask)" in labels
    legend = [text.get_text() for text in bandwidth.get_legend().get_texts()]
    assert len(legend) == len(set(legend)) and {*labels, "measured read: 4,000 GB/s"} == set(legend)
    assert axes.get_yscale() == "log" and axes.get_xscale() == "symlog"
    ours = axes.get_lines()[0]
    assert list(ours.get_xdata()) == [0, 256, 1024, 4096, 16384, 65536, 131072, 185000]
    expected = {r["lengths"][0]: r["us"] for r in file.records if r["nsplit"] is None and r["H"] == 8}
    assert list(ours.get_ydata()) == [expected[x] for x in ours.get_xdata()]


def test_a_peer_without_a_time_is_left_out_of_lines_but_not_of_the_table(tmp_path):
    record = bench_record(4096)
    record["peers"]["flashmla"] = {"error": "pages only", "note": ""}
    (file,) = load_results([write(tmp_path / "r.json", bench_result(record, bench_record(1024)))])
    main = next(bench_pictures(file))
    line = {line.get_label(): line for line in main.figure.axes[0].get_lines()}["flashmla (chain mask)"]
    assert list(line.get_xdata()) == [1024]
    assert "pages only" in page([(file, [])])


def test_a_red_record_is_not_drawn(tmp_path):
    red = bench_record(4096)
    del red["us"]
    (file,) = load_results([write(tmp_path / "r.json", bench_result(red, bench_record(1024)))])
    assert [r["lengths"] for r in file.records] == [[1024]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "schema is None"),
        ('{"schema": "other/3"}', "schema is 'other/3', expected verify-numba-bench/1 or"),
        ('{"schema": "verify-numba-bench/1"}', "results is NoneType, expected a list"),
        ('{"schema": "verify-numba-bench/1", "results": [{"H": 8}]}', "results[0] has no T, bs"),
        ('{"schema": "verify-numba-bench/1", "results": []}', "nothing was measured"),
    ],
)
def test_what_is_not_a_result_is_refused(tmp_path, capsys, content, message):
    path = tmp_path / "bad.json"
    path.write_text(content)
    assert main(["report", str(path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and str(path) in error and "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_a_missing_file_is_named(tmp_path, capsys):
    assert main(["report", str(tmp_path / "none.json")]) == 2
    assert "none.json: No such file" in capsys.readouterr().err


def test_order_and_labels():
    assert in_order(["zeta", "flashmla", OURS, "sglang-triton"]) == [
        OURS,
        "sglang-triton",
        "flashmla",
        "zeta",
    ]
    assert [short(n) for n in (0, 900, 4096, 131072, 185000)] == ["0", "900", "4k", "128k", "185k"]
