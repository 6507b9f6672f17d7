"""The live command without an engine: its refusals, the model folder, and what it concludes from two runs."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from harness import live, live_engine, live_options, live_run
from harness.errors import UsageError
from harness.live_faults import faults_of
from harness.live_model import build_model, seeded_weights
from harness.live_prompts import churn_batches, timed_prompt
from harness.live_report import Comparison
from harness.live_run import LiveRunner
from harness.live_schedule import run_modes
from harness.live_spec import VOCABULARY, LiveSpec

ROOT = Path(__file__).resolve().parents[2]


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    live.add_arguments(parser)
    return parser.parse_args(arguments)


def spec(*arguments: str) -> LiveSpec:
    return live_options.spec_of(parsed("--churn", "3", "--batch", "2", "--lengths", "100,200", *arguments))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--modes", "off,sometimes"), "--modes: found 'sometimes'"),
        (("--lengths", "1k"), "--lengths: found '1k'"),
        (("--batch", "0"), "--batch: found 0"),
        (("--draft-tokens", "65"), "--draft-tokens: found 65"),
        (("--memory", "1.5"), "--memory: found 1.5"),
        (("--set", "KDTREE_VERIFY=on"), "--set: found 'KDTREE_VERIFY'"),
        (("--set", "KDTREE_FORM=round"), "auto, cluster, single"),
    ],
)
def test_bad_options(arguments, says):
    with pytest.raises(UsageError, match=says):
        live.run(parsed(*arguments))


def test_refused_without_sglang(monkeypatch):
    monkeypatch.setattr(live_run.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs SGLang, which is not installed"):
        live.run(parsed())


def test_refused_without_a_gpu(monkeypatch):
    monkeypatch.setattr(live_run.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="needs a GPU that torch can use"):
        live.run(parsed())


def test_a_spec_travels_as_json():
    made = spec("--algorithm", "eagle", "--eager")
    assert LiveSpec.from_json(made.to_json()) == made
    assert made.T == 16 and not made.graphs and spec().T == 9


def test_engine_options_follow_the_spec():
    eagle = live_engine.engine_options(spec("--algorithm", "eagle", "--topk", "3"), "model")
    assert eagle["speculative_algorithm"] == "EAGLE" and eagle["speculative_eagle_topk"] == 3
    assert eagle["speculative_num_draft_tokens"] == 16 and not eagle["disable_cuda_graph"]
    ngram = live_engine.engine_options(spec("--eager"), "model")
    assert ngram["speculative_algorithm"] == "NGRAM" and ngram["disable_cuda_graph"]
    assert ngram["context_length"] >= 2048 + 64 + 9


def test_the_model_is_deepseek_shaped(tmp_path):
    config = json.loads((build_model(tmp_path / "m", spec("--heads", "16")) / "config.json").read_text())
    assert config["kv_lora_rank"] + config["qk_rope_head_dim"] == 576
    assert config["num_attention_heads"] == 16 and config["first_k_dense_replace"] == config["num_hidden_layers"]


def test_weights_are_seeded_and_of_unit_scale():
    def model():
        made = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(64), "proj": torch.nn.Linear(64, 512, bias=False)})
        seeded_weights(made)
        return made

    first, second = model(), model()
    assert torch.equal(first["proj"].weight, second["proj"].weight)
    assert float(first["proj"].weight.detach().std()) == pytest.approx(1 / 8, rel=0.05)
    assert torch.equal(first["norm"].weight.detach(), torch.ones(64))


def test_prompts_repeat_and_are_the_same_for_every_mode():
    batches = churn_batches(spec())
    assert [len(batch) for batch in batches] == [1, 2, 1]
    assert batches == churn_batches(spec())
    prompt = timed_prompt(spec(), 500)
    assert len(prompt) == 500 and set(prompt) < set(range(2, VOCABULARY))
    pairs = set(itertools.pairwise(prompt))
    assert len(pairs) <= 2 * VOCABULARY  # few followers: what n-grams match on


ENGINE = """
import itertools, os, time

__version__ = "stub"
drawn = itertools.count()


class Flushed:
    def __init__(self, success):
        self.success = success


class Engine:
    def __init__(self, **options):
        self.options = options
        self.flushes = itertools.count()
        if os.environ.get("STUB_FAILS"):
            raise RuntimeError("out of memory")
        time.sleep(float(os.environ.get("STUB_HANGS", 0)))

    def generate(self, input_ids, sampling_params, return_logprob=False, top_logprobs_num=0, stream=False):
        batch = input_ids if isinstance(input_ids[0], list) else [input_ids]
        answers = [self.answer(prompt, sampling_params["max_new_tokens"]) for prompt in batch]
        if stream:
            return self.chunks(answers[0])
        return answers if isinstance(input_ids[0], list) else answers[0]

    def answer(self, prompt, new_tokens):
        on = os.environ.get("KDTREE_VERIFY") == "on"
        extra = next(drawn) if os.environ.get("STUB_RANDOM") else 0
        return {
            "output_ids": [len(prompt) % 7, 3 + on + extra][:new_tokens],
            "meta_info": {"spec_verify_ct": 5, "output_top_logprobs": [[(-1.0, 3, None), (-1.01, 4, None)]]},
        }

    def chunks(self, answer):
        yield {"output_ids": answer["output_ids"][:1], "meta_info": {}}
        time.sleep(0.5)
        yield answer

    def flush_cache(self):
        return Flushed(next(self.flushes) % 2 == 1)  # busy at first, as after an overlapped step

    def shutdown(self):
        pass
"""


@pytest.fixture
def stub_engine(tmp_path, monkeypatch):
    package = tmp_path / "stub" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setattr(live, "refuse_without_engine", lambda gpus: None)


def test_the_whole_command_with_a_stub_engine(tmp_path, stub_engine, capsys):
    keep, result = tmp_path / "keep", tmp_path / "out.json"
    arguments = ["--modes", "off,off,on", "--churn", "2", "--lengths", "50", "--repeat", "3", "--gpus", "0,1,2"]
    arguments += ["--keep", str(keep), "--json", str(result)]
    assert live.run(parsed(*arguments)) == 1  # the stub loads no plug-in, which is a fault
    found = json.loads(result.read_text())
    assert found["faults"] == ["on: no process reported the plug-in: it is not live"]
    assert found["machine"]["platform"] == platform.platform() and found["versions"]["torch"] == torch.__version__
    assert [run["label"] for run in found["runs"]] == ["off", "off-2", "on"]
    assert found["runs"][1]["differing"] == []
    assert found["runs"][2]["differing"][0]["logit_gap"] == pytest.approx(0.01)
    timing = found["runs"][0]["timings"][0]
    assert timing["steps"] == 5 * timing["samples"] and 100 <= timing["ms_per_step"] < 200  # 0.5 s, 5 steps
    assert found["runs"][2]["repeats"] == {"runs": 3, "distinct": 1}
    printed = capsys.readouterr()
    assert "near tie" in printed.out and (keep / "on.log").exists()
    assert "3 repetitions of one batch, 1 distinct outcomes" in printed.out
    assert "off-2:" in printed.err and "length 50:" in printed.err and "ms a verify step" in printed.err


def test_a_run_that_fails_does_not_hide_the_others(tmp_path, stub_engine, monkeypatch, capsys):
    runner = LiveRunner(spec(), tmp_path, tmp_path, {})
    whole = runner.run

    def run(label, mode, gpus=None):
        if mode == "validate":
            raise UsageError("live: the engine of run 'validate' failed (exit 1)\nlog line")
        return whole(label, mode, gpus)

    monkeypatch.setattr(runner, "run", run)
    runs, failures = run_modes(runner, ["off", "validate", "off"], [None])
    assert [r.label for r in runs] == ["off", "off-2"]
    comparison = Comparison.of(spec(), runs, runner, 0.1, failures)
    assert comparison.faults == ["live: the engine of run 'validate' failed (exit 1)"]


def test_a_run_that_takes_too_long_is_killed_with_its_group(tmp_path, stub_engine, monkeypatch):
    monkeypatch.setenv("STUB_HANGS", "600")
    runner = LiveRunner(spec(), tmp_path, tmp_path, {}, timeout_s=1.0)
    started = time.monotonic()
    with pytest.raises(UsageError, match="not done after 1 s, killed"):
        runner.run("off", "off")
    assert time.monotonic() - started < 30


def test_a_terminated_command_leaves_no_engine_behind(tmp_path, stub_engine):
    code = (
        "import argparse, sys; from harness import live; live.refuse_without_engine = lambda gpus: None;"
        "p = argparse.ArgumentParser(); live.add_arguments(p); sys.exit(live.run(p.parse_args(sys.argv[1:])))"
    )
    arguments = ["--churn", "0", "--lengths", "none", "--modes", "off,off", "--keep", str(tmp_path / "keep")]
    env = {**os.environ, "STUB_HANGS": "600"}
    command = subprocess.Popen([sys.executable, "-c", code, *arguments], env=env, cwd=ROOT)
    log = tmp_path / "keep" / "off.log"
    deadline = time.monotonic() + 60
    while not log.exists() or not (workers := workers_of(tmp_path)):
        assert time.monotonic() < deadline and command.poll() is None
        time.sleep(0.1)
    command.terminate()
    assert command.wait(timeout=30) == 128 + 15
    assert not workers_of(tmp_path) and not (tmp_path / "keep" / "off-2.log").exists(), workers


def workers_of(folder: Path) -> list[str]:
    """Command lines of running workers whose files are in `folder`."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if "harness.live_worker" in words and str(folder) in " ".join(words):
            lines.append(" ".join(words))
    return lines


def test_repetitions_that_differ_are_a_fault(tmp_path, stub_engine, monkeypatch):
    monkeypatch.setenv("STUB_RANDOM", "1")
    repeated = spec("--repeat", "2", "--churn", "0", "--lengths", "none")
    run = LiveRunner(repeated, tmp_path, tmp_path, {}).run("off", "off")
    assert list(faults_of(run, repeated)) == ["2 repetitions of one batch gave 2 different answers"]


def test_a_failing_engine_is_one_message_with_its_log(tmp_path, stub_engine, monkeypatch):
    monkeypatch.setenv("STUB_FAILS", "1")
    runner = LiveRunner(spec(), tmp_path, tmp_path, {})
    with pytest.raises(UsageError, match="run 'off' failed") as raised:
        runner.run("off", "off")
    assert "out of memory" in str(raised.value)


def test_settings_of_the_caller_do_not_leak_into_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("KDTREE_VERIFY", "on")
    monkeypatch.setenv("KDTREE_CAPTURE", "/somewhere")
    runner = LiveRunner(spec(), tmp_path, tmp_path, {"KDTREE_NSPLIT": "4"})
    off = runner._environment({"KDTREE_VERIFY": "off"})
    assert {k: v for k, v in off.items() if k.startswith("KDTREE_")} == {"KDTREE_VERIFY": "off"}
    assert runner._environment({"KDTREE_VERIFY": "on"})["KDTREE_NSPLIT"] == "4"


def test_spawned_processes_get_the_seeded_weights(tmp_path):
    """An engine's process imports the worker as `__mp_main__`; the hook must be registered by then."""
    package = tmp_path / "sglang" / "srt" / "plugins"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    (package / "hook_registry.py").write_text(
        "import enum\nclass HookType(enum.Enum):\n    REPLACE = 1\n"
        "class HookRegistry:\n    def register(target, hook, kind): print(target, hook.__name__, kind.name)\n"
    )
    code = "import runpy; runpy.run_module('harness.live_worker', run_name='__mp_main__')"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [
        "sglang.srt.model_loader.loader.initialize_dummy_weights",
        "seeded_weights",
        "REPLACE",
    ]
