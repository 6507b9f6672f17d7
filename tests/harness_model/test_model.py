"""`model`: the fit, the limiters, the comparison and unusable input. All results here are made up."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from harness import model
from harness.cli import main
from harness.model_card import CARDS, by_key, with_inputs
from harness.model_fit import Fit, Line, Split, fit, split
from harness.model_predict import Held, predict
from tests.bench.results import bench_record, bench_result

LENGTHS = (4096, 16384, 65536, 131072)
FIXED, TILE_US = 7.5, 0.25
PRO = by_key("pro6000")


def stored(path, lengths=LENGTHS, us=lambda L: FIXED + TILE_US * split(L, 132).share, **machine):
    result = bench_result(*(bench_record(L, us=us(L)) for L in lengths))
    result["machine"] = {"gpu": "Imaginary GPU", "sms": 132, **machine}
    path.write_text(json.dumps(result))
    return str(path)


@pytest.fixture
def source(tmp_path):
    return stored(tmp_path / "source.json")


def outcome(tmp_path, *options):
    target = tmp_path / "model.json"
    assert main(["model", *options, "--json", str(target)]) == 0
    return json.loads(target.read_text())


def test_a_fit_recovers_planted_numbers():
    lines = [Line(L, FIXED + TILE_US * split(L, 132).share) for L in LENGTHS]
    found = fit(lines, 132, "here")
    assert (found.fixed_us, found.tile_us) == pytest.approx((FIXED, TILE_US))
    assert max(abs(found.error_percent(line)) for line in lines) < 1e-9


def test_a_line_off_the_fit_shows_its_error():
    lines = [Line(L, FIXED + TILE_US * split(L, 132).share) for L in LENGTHS]
    lines[0] = replace(lines[0], us=2 * lines[0].us)
    found = fit(lines, 132, "here")
    assert found.error_percent(lines[0]) < -5


@pytest.mark.parametrize(
    ("L", "share", "busy"),
    [(0, 4, 1), (1024, 4, 17), (4096, 4, 65), (65536, 63, 66), (65536 - 16, 63, 66), (66 * 16 * 10, 11, 61)],
)
def test_shares_are_the_plans(L, share, busy):
    assert split(L, 132) == Split(share, busy)


def measured(tile_us):
    return Fit((), 132, FIXED, tile_us)


def test_the_longest_limiter_rules():
    slow_kernel, quick_kernel = measured(5.0), measured(0.01)
    assert predict(slow_kernel, 2.0, PRO, 65536).rules == "kernel"
    assert predict(quick_kernel, 2.0, PRO, 65536).rules == "memory"
    assert predict(quick_kernel, 2.0, with_inputs(PRO, None, 1e6, None), 65536).rules == "mma"
    assert predict(quick_kernel, 2.0, with_inputs(PRO, None, None, 1e4), 65536).limits["mma"] < 0.05


def test_low_and_high_and_the_floors():
    card = replace(PRO, sms=132, boost_ghz=4.0, bandwidth_gbps=1000.0)
    found = predict(measured(2.0), 2.0, card, 65536)
    assert found.limits["kernel"] == pytest.approx(1.0)  # half the time at twice the clock
    assert found.limits["memory"] == pytest.approx(66 * 16 * 1152 / 1e3 / 1e3)
    assert found.low_us == pytest.approx(FIXED + 63 * found.limits["memory"])
    assert found.high_us == pytest.approx(FIXED + 63 * (found.limits["memory"] + 1.0))
    assert found.floor.bytes_us == pytest.approx((65536 + 9) * 1152 / 1e6)
    assert found.low_us > found.floor.us


def test_a_card_computes_what_its_tensor_cores_do():
    tile = predict(measured(0.01), 2.0, PRO, 65536).limits["mma"]
    assert tile == pytest.approx(16 * 72 * 2 * 1088 / (2 * 1024) / PRO.boost_ghz / 1e3)


def test_inputs_replace_published_figures():
    card = with_inputs(PRO, 2.0, 1500.0, 400.0)
    assert (card.boost_ghz, card.bandwidth_gbps) == (2.0, 1500.0)
    assert card.mma_tflops == pytest.approx(400.0)
    slower = with_inputs(PRO, PRO.boost_ghz / 2, None, None)
    assert slower.mma_tflops == pytest.approx(PRO.mma_tflops / 2)


@pytest.mark.parametrize(("factor", "verdict"), [(0.9, "faster"), (1.01, "inside"), (9.0, "slower")])
def test_a_measured_line_is_held_against_both_ends(factor, verdict):
    prediction = predict(measured(0.5), 2.0, PRO, 65536)
    held = Held(Line(65536, factor * prediction.low_us), prediction)
    assert held.verdict == verdict
    assert held.ratios[0] == pytest.approx(factor)
    assert held.ratios[1] < held.ratios[0]


def test_the_command_predicts_every_card_and_says_so(source, tmp_path, capsys):
    result = outcome(tmp_path, "--from", source, "--L", "4k,200000")
    assert result["measured"]["fit"]["tile_us"] == pytest.approx(TILE_US)
    assert [card["card"] for card in result["cards"]] == [card.name for card in CARDS]
    for card in result["cards"]:
        assert [item["L"] for item in card["predictions"]] == [4096, 200000]
        assert all(math.isfinite(item["predicted_low_us"]) for item in card["predictions"])
        assert card["assumptions"]
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("A PREDICTION") == len(CARDS)
    assert "published figures, not measured" in said


def test_the_clock_scales_the_kernels_cycles(source, tmp_path):
    slow, quick = (
        outcome(tmp_path, "--from", source, "--card", "5090", "--clock", clock)["cards"][0]["predictions"][0]
        for clock in ("1", "2")
    )
    assert quick["us_a_tile"]["kernel"] == pytest.approx(2 * slow["us_a_tile"]["kernel"])
    assert quick["us_a_tile"]["mma"] == slow["us_a_tile"]["mma"]


def test_compare_prints_measured_beside_predicted(source, tmp_path, capsys):
    theirs = stored(tmp_path / "card.json", us=lambda L: 10 + L / 1e3, gpu=f"NVIDIA {PRO.name} Server", sms=188)
    result = outcome(tmp_path, "--from", source, "--compare", theirs)
    assert result["card"] == PRO.name
    assert [item["L"] for item in result["comparison"]] == list(LENGTHS)
    line = result["comparison"][-1]
    assert line["measured_us"] == pytest.approx(10 + 131.072)
    assert line["measured_over_low"] == pytest.approx(line["measured_us"] / line["predicted_low_us"])
    said = capsys.readouterr().out
    assert "measured beside predicted" in said
    assert f"{line['measured_over_low']:.2f}" in said


def test_the_stored_result_is_the_default(tmp_path):
    if not (model.ROOT / model.STORED).is_file():
        pytest.skip("the stored result comes with a checkout only")
    result = outcome(tmp_path)
    assert result["measured"]["gpu"] == "NVIDIA H200"
    assert max(abs(line["error_percent"]) for line in result["measured"]["fit"]["lines"] if line["L"] >= 65536) < 3


def refused(capsys, *options):
    """The one line on stderr of a command that ends with 2."""
    assert main(["model", *options]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    return said.err


def test_unusable_sources_are_named(source, tmp_path, capsys, monkeypatch):
    other = tmp_path / "other.json"
    other.write_text('{"schema": "verify-numba-context/1", "results": []}')
    assert "no such file" in refused(capsys, "--from", str(tmp_path / "absent.json")).lower()
    assert "expected 'verify-numba-bench/1'" in refused(capsys, "--from", str(other))
    assert "expected at least 3" in refused(capsys, "--from", stored(tmp_path / "few.json", LENGTHS[:2]))
    assert "machine.sms is None" in refused(capsys, "--from", stored(tmp_path / "sms.json", sms=None))
    falling = stored(tmp_path / "falling.json", us=lambda L: 200 - L / 1e3)
    assert "expected both above 0" in refused(capsys, "--from", falling)
    monkeypatch.setattr(model, "ROOT", tmp_path)
    assert "comes with a checkout" in refused(capsys)


def test_a_result_from_another_card_is_not_compared(source, tmp_path, capsys):
    laptop = stored(tmp_path / "laptop.json", gpu="NVIDIA GeForce RTX 5090 Laptop GPU", sms=82)
    assert "measured on NVIDIA GeForce RTX 5090 Laptop" in refused(capsys, "--from", source, "--compare", laptop)
    assert "--card 5090 has 170" in refused(capsys, "--from", source, "--compare", laptop, "--card", "5090")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--boost", "2.5"], "name it with --card"),
        (["--card", "5090", "--mma", "-1"], "--mma is -1"),
        (["--clock", "nan"], "--clock is nan"),
        (["--L", "4q"], "--L"),
        (["--compare", "x.json", "--L", "4k"], "found --L too"),
    ],
)
def test_unusable_options(source, options, said, capsys):
    assert said in refused(capsys, "--from", source, *options)
