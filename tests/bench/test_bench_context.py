from __future__ import annotations

import json
import time

import pytest

from harness import bench_context_command
from harness.bench_context_client import Chunk, Client, ServerError, Stream
from harness.bench_context_measure import make_row, measure, tokens_at
from harness.bench_context_meters import MetersMissing, Reading, Recorder
from harness.bench_context_prompts import NONCE, PERIOD, make_prompt
from harness.cli import main
from harness.report_load import load_results
from tests.bench.stub_server import Script, serve


class Steady:
    def read(self):
        return Reading(time.monotonic(), 98.0, 40.0, 300.0)

    def name(self):
        return "Steady GPU"


def stream(*points, sent=0.0, **meta):
    return Stream(sent, [Chunk(at, tokens) for at, tokens in points], meta)


def row_of(*streams, context=100, readings=()):
    recorder = Recorder(None)
    recorder.readings = list(readings)
    return make_row(context, streams, recorder)


def test_speeds_of_one_stream():
    row = row_of(stream((2.0, 1), (3.0, 5), (6.0, 9), sent=1.0, cached_tokens=20))
    assert row["decode_tokens_per_s"] == pytest.approx(8 / 4)
    assert row["prefill_tokens_per_s"] == pytest.approx(80 / 1)
    assert row["accept_length"] is None


def test_only_the_stretch_in_which_all_streams_decode_counts():
    first = stream((1.0, 1), (2.0, 11), (3.0, 21), (4.0, 31))
    second = stream((2.0, 1), (3.0, 5), (5.0, 9))
    row = row_of(first, second)
    assert row["decode_s"] == pytest.approx(2.0)
    assert row["decode_tokens_per_s"] == pytest.approx((20 + 4) / 2)


def test_streams_that_never_overlap_are_refused():
    with pytest.raises(ServerError, match="--new-tokens"):
        row_of(stream((1.0, 1), (2.0, 5)), stream((3.0, 1), (4.0, 5)))


def test_speculation():
    row = row_of(stream((0.5, 1), (2.5, 30), spec_verify_ct=10))
    assert row["accept_length"] == pytest.approx(3.0)
    assert row["step_ms"] == pytest.approx(200)


def test_meters_of_the_decoding_stretch_only():
    readings = [
        Reading(0.1, 0, 0, 50),
        Reading(1.5, 90, 40, 300),
        Reading(2.5, 100, 60, 400),
        Reading(9, 0, 0, 50),
    ]
    row = row_of(stream((1.0, 1), (3.0, 9)), readings=readings)
    assert (row["gpu_percent"], row["memory_percent"], row["power_w"]) == (95, 50, 350)


def test_tokens_at():
    assert [tokens_at(stream((1.0, 2), (2.0, 5)), t) for t in (0.5, 1.0, 1.9, 3.0)] == [0, 2, 2, 5]


@pytest.mark.parametrize("length", [1, 7, 8, 100, 4096])
@pytest.mark.parametrize("kind", ["random", "predictable"])
def test_prompts_have_their_length_and_differ_at_once(kind, length):
    prompts = [make_prompt(kind, length, 32000, seed) for seed in range(20)]
    assert {len(prompt) for prompt in prompts} == {length}
    assert all(0 <= token < 32000 for prompt in prompts for token in prompt)
    assert len({prompt[0] for prompt in prompts}) > 15


def test_predictable_prompts_repeat_and_random_ones_do_not():
    predictable = make_prompt("predictable", 1000, 32000, 0)[NONCE:]
    assert predictable[:-PERIOD] == predictable[PERIOD:]
    assert len(set(make_prompt("random", 1000, 32000, 0))) > 900


def test_a_tiny_vocabulary():
    assert set(make_prompt("random", 500, 4, 0)) <= {3, 2, 1, 0}
    assert max(make_prompt("predictable", 500, 64, 0)) < 64


@pytest.mark.parametrize("api", ["generate", "openai"])
def test_a_stream_from_the_stub(api):
    script = Script()
    with serve(script) as url:
        result = Client(url, api, api_key="secret").generate([5, 6, 7], 20)
    assert result.chunks[0].tokens == 1 and result.chunks[-1].tokens == 20
    ((path, body),) = script.requests
    assert script.keys == ["Bearer secret"]
    if api == "generate":
        assert path == "/generate" and body["input_ids"] == [5, 6, 7]
        assert body["sampling_params"] == {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
        assert result.meta["spec_verify_ct"] == 10
    else:
        assert path == "/v1/completions" and body["prompt"] == [5, 6, 7] and body["model"] == "stub"


def test_chunks_without_a_count_are_settled_by_the_total():
    with serve(Script(per_step=4, continuous=False)) as url:
        result = Client(url, "openai").generate([1], 41)
    assert result.chunks[-1].tokens == 41 and len(result.chunks) == 11


def test_measure_sees_pace_concurrency_and_meters():
    script = Script(prefill_s=0.05, step_s=0.02, per_step=2)
    with serve(script) as url:
        row = measure(Client(url), [[1] * 50, [2] * 50], 41, Steady())
    assert row["concurrency"] == 2 and row["context"] == 50
    assert 0 < row["decode_tokens_per_s"] <= 2 * 2 / 0.02 * 1.05
    assert row["accept_length"] == pytest.approx(82 / 40)
    assert row["step_ms"] >= 20
    assert row["memory_percent"] == pytest.approx(40)


def test_a_gauge_that_fails_does_not_end_the_run():
    class Broken(Steady):
        def read(self):
            raise RuntimeError("GPU is lost")

    with serve(Script(step_s=0.05)) as url:
        row = measure(Client(url), [[1, 2]], 11, Broken())
    assert row["gpu_percent"] is None and "GPU is lost" in row["meter_failure"]


def test_a_broken_stream_and_a_refusal_say_why():
    with serve(Script(break_after=2)) as url, pytest.raises(ServerError, match="scheduler died"):
        Client(url).generate([1], 50)
    with serve(Script(fail_from=1)) as url, pytest.raises(ServerError, match="HTTP 400.*too long"):
        Client(url).generate([1], 50)


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_context_command, "_gauge", lambda text: (Steady(), ""))
    target = tmp_path / "context.json"
    script = Script(step_s=0.01, cached=3)
    with serve(script) as url:
        options = ["--url", url, "--contexts", "32,64", "--new-tokens", "40", "--label", "on"]
        assert main(["bench-context", *options, "--json", str(target)]) == 0
    assert [len(body["input_ids"]) for _, body in script.requests] == [32, 64]
    result = json.loads(target.read_text())
    assert result["complete"] and result["label"] == "on"
    assert result["server"] == {"tp_size": 1, "speculative_algorithm": "NGRAM"}
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("context")]
    assert len(lines) == 2
    for text in ("tok/s", "tokens a step", "memory 40%", "300 W", "3 prompt tokens were cached"):
        assert text in lines[0]
    (file,) = load_results([str(target)])
    assert file.label == "on" and file.machine == "Steady GPU" and len(file.records) == 2


def test_two_runs_share_no_prefix():
    script = Script(step_s=0, prefill_s=0)
    with serve(script) as url:
        for _ in range(2):
            main(["bench-context", "--url", url, "--contexts", "64", "--new-tokens", "4", "--gpus", "none"])
    first, second = (body["input_ids"] for _, body in script.requests)
    assert first[:NONCE] != second[:NONCE]


def test_a_length_that_fails_is_reported_and_the_rest_goes_on(capsys):
    with serve(Script(step_s=0.001, fail_from=100)) as url:
        options = ["--url", url, "--contexts", "10,200,20", "--new-tokens", "30", "--gpus", "none"]
        assert main(["bench-context", *options, "--json", "-"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert [row.get("error") is not None for row in result["results"]] == [False, True, False]
    assert "200 tokens is too long" in result["results"][1]["error"]


def test_missing_meters_are_named(monkeypatch, capsys):
    def missing(indices):
        raise MetersMissing("nvidia-ml-py is not installed")

    monkeypatch.setattr(bench_context_command, "Nvml", missing)
    with serve(Script(step_s=0.001)) as url:
        assert main(["bench-context", "--url", url, "--contexts", "10", "--new-tokens", "30"]) == 0
    assert "GPU meters: nvidia-ml-py is not installed" in capsys.readouterr().out


def test_nobody_at_the_address(capsys):
    assert main(["bench-context", "--url", "http://127.0.0.1:9", "--contexts", "10"]) == 2
    error = capsys.readouterr().err
    assert "http://127.0.0.1:9/health: no answer" in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--contexts", "0"], "--contexts: 0 is below 1"),
        (["--contexts", "x"], "--contexts: 'x'"),
        (["--new-tokens", "1"], "--new-tokens: 1 is below 2"),
        (["--concurrency", "0"], "--concurrency: 0"),
        (["--vocab", "1"], "--vocab: 1"),
        (["--url", "localhost:1"], "--url: 'localhost:1'"),
    ],
)
def test_bad_options(options, message, capsys):
    assert main(["bench-context", *options]) == 2
    assert message in capsys.readouterr().err


def test_the_key_stays_out_of_results():
    hide = bench_context_command._without_key
    assert hide(["--api-key", "s3cret", "--x"]) == ["--api-key", "***", "--x"]
    assert hide(["--api-key=s3cret"]) == ["--api-key=***"]
