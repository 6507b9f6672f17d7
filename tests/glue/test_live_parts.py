"""Parts of the live command: what each rank accepted, shards of weights, the plug-in's distribution, bounded work."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness import live_options
from harness.errors import UsageError
from harness.live_accepted import AcceptedHash, _Recorder, read_accepted
from harness.live_engine import engine_options
from harness.live_model import model_config, seeded_weights
from harness.live_prompts import repeated_batch
from harness.live_run import plugin_paths
from harness.live_schedule import labels_of
from harness.live_spec import LiveSpec
from harness.live_timing import stream

ROOT = Path(__file__).resolve().parents[2]


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    live_options.add_arguments(parser)
    return parser.parse_args(arguments)


def spec(*arguments: str) -> LiveSpec:
    return live_options.spec_of(parsed(*arguments))


def hashed(*steps: tuple[list[int], list[list[int]]]) -> dict:
    made = AcceptedHash("cpu")
    for predict, accept_index in steps:
        made.add(torch.tensor(predict, dtype=torch.int32), torch.tensor(accept_index, dtype=torch.int32))
    return made.read()


FIRST, SECOND = ([5, 6, 7], [[0, 2, -1]]), ([5, 6, 8], [[0, -1, -1]])


def test_the_hash_of_accepted_tokens_depends_on_each_and_on_their_order():
    assert hashed(FIRST, SECOND) == hashed(FIRST, SECOND)
    assert hashed(FIRST, SECOND)["steps"] == 2
    others = [hashed(SECOND, FIRST), hashed(FIRST, FIRST), hashed(([5, 6, 7], [[0, 1, -1]]), SECOND), hashed(FIRST)]
    assert len({found["hash"] for found in [hashed(FIRST, SECOND), *others]}) == 5


def test_each_rank_writes_what_it_accepted(tmp_path, monkeypatch):
    context = SimpleNamespace(get_parallel=lambda: SimpleNamespace(tp_rank=1))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    monkeypatch.setattr("harness.live_accepted.PERIOD_S", 0.01)
    recorder = _Recorder(tmp_path)
    predict, accept_index = torch.tensor(FIRST[0]), torch.tensor(FIRST[1])
    recorder.after_sample((predict, None, accept_index[:0]))  # an idle step
    recorder.after_sample((predict, None, accept_index))
    deadline = time.monotonic() + 10
    while not (found := read_accepted(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert found == {"tp1": hashed(FIRST)}


def test_shards_differ_by_rank_and_whole_parameters_do_not(monkeypatch):
    def weights(rank: int) -> dict[str, torch.Tensor]:
        context = SimpleNamespace(get_parallel=lambda: SimpleNamespace(tp_rank=rank))
        monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
        names = ("whole", "columns", "rows")
        model = torch.nn.ModuleDict({name: torch.nn.Linear(256, 128, bias=False) for name in names})
        model["columns"].tp_size = model["rows"].tp_size = 2
        model["rows"].input_is_parallel = True
        seeded_weights(model)
        return {name: module.weight.detach() for name, module in model.items()}

    zero, one = weights(0), weights(1)
    assert torch.equal(zero["whole"], one["whole"])
    assert not torch.equal(zero["columns"], one["columns"]) and not torch.equal(zero["rows"], one["rows"])
    assert float(zero["columns"].std()) == pytest.approx(256**-0.5, rel=0.05)
    assert float(zero["rows"].std()) == pytest.approx(512**-0.5, rel=0.05)  # the sum over two ranks has unit size


def test_a_checkout_that_is_not_installed_shows_both_entry_points(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.live_run.entry_points", lambda group: [])
    paths = plugin_paths(tmp_path)
    code = (
        "import json; from importlib.metadata import entry_points;"
        "print(json.dumps([e.name for e in entry_points(group='sglang.srt.plugins') if e.load()]))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert {"verify_numba", "verify_numba_defrag"} <= set(json.loads(ran.stdout))


def test_every_rank_has_the_heads_that_were_asked_for():
    two = spec("--tp", "2", "--heads", "8")
    assert model_config(two)["num_attention_heads"] == 16
    options = engine_options(two, "model")
    assert options["tp_size"] == 2 and options["disable_custom_all_reduce"] is True
    assert "disable_custom_all_reduce" not in engine_options(spec(), "model")


def test_engine_arguments_of_the_caller_win_over_ours():
    made = spec("--engine", "page_size=64", "--engine", "cuda_graph_bs_decode=[1,2]", "--engine", "device=cuda")
    options = engine_options(LiveSpec.from_json(made.to_json()), "model")
    assert (options["page_size"], options["cuda_graph_bs_decode"], options["device"]) == (64, [1, 2], "cuda")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--engine", "tp_size=2"), "--engine: found 'tp_size=2'"),
        (("--engine", "page_size"), "--engine: found 'page_size'"),
        (("--gpus", "0,0"), "--gpus: found '0,0'"),
        (("--gpus", "0", "--tp", "2"), "--gpus: found 1 GPUs, expected at least --tp 2"),
        (("--tp", "0"), "--tp: found 0"),
        (("--timeout", "0"), "--timeout: found 0"),
        (("--churn", "-1"), "--churn: found -1"),
    ],
)
def test_bad_options(arguments, says):
    args = parsed(*arguments)
    with pytest.raises(UsageError, match=says):
        live_options.spec_of(args)
        live_options.gpu_groups(args)


def test_gpus_are_shared_out_by_rank():
    assert live_options.gpu_groups(parsed("--gpus", "0,1,2,3,4", "--tp", "2")) == ["0,1", "2,3"]
    assert live_options.gpu_groups(parsed()) == [None]
    assert labels_of(["off", "on", "off", "off"]) == ["off", "on", "off-2", "off-3"]


def test_timed_work_is_bounded_whatever_the_length():
    made = spec("--lengths", "1024,16384,65536,131072", "--churn", "0", "--batch", "1")
    assert [made.timed_tokens(length) for length in made.lengths] == [64, 32, 8, 8]
    assert made.pool_tokens > made.context_length > 131072 + 64
    short = spec("--new-tokens", "4")
    assert short.timed_tokens(131072) == 4


def test_churn_goes_through_its_pool_more_than_once():
    made = spec("--lengths", "none")
    batch = made.batch * (made.churn_longest + made.new_tokens)
    assert batch < made.pool_tokens < 2 * batch
    repeated = repeated_batch(made)
    assert len(repeated) == made.batch and max(map(len, repeated)) == made.churn_longest


def test_the_clock_starts_at_the_first_chunk():
    class Engine:
        def generate(self, input_ids, sampling_params, stream):
            time.sleep(0.3)  # the forward of the prompt
            yield {"output_ids": [1], "meta_info": {}}
            time.sleep(0.1)
            yield {"output_ids": [1, 2, 3], "meta_info": {"spec_verify_ct": 1}}
            time.sleep(0.1)
            yield {"output_ids": [1, 2, 3, 4], "meta_info": {"spec_verify_ct": 2}}

    sample = stream(Engine(), [7, 8], 4)
    assert sample.tokens == [1, 2, 3, 4] and sample.steps == 2 and 0.19 <= sample.seconds < 0.29
