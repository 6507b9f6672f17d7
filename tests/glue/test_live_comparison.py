"""What a live comparison says of finished runs: differing answers, faults, ranks."""

from __future__ import annotations

import json

import pytest
import torch

from harness.live_compare import divergences
from harness.live_faults import faults_of
from harness.live_prompts import churn_batches
from harness.live_report import Comparison, print_comparison
from harness.live_run import ModeRun
from sglang_glue.settings import Mode
from tests.glue.fakes import FakeVerifier, make_call
from tests.glue.slots import make_slot
from tests.glue.test_live import spec
from tests.glue.test_status import report_of


def finished(label, mode, backends=(), change=None):
    """A run whose answers are all [5, 6, 7, 8], but for one token."""
    batches = [[[5, 6, 7, 8] for _ in batch] for batch in churn_batches(spec())]
    if change:
        batch, request, position, token = change
        batches[batch][request][position] = token
    timings = [
        {"length": length, "steps": 4, "ms_per_step": 20.0 if mode == "off" else 2.0, "tokens": [5, 6]}
        for length in spec().lengths
    ]
    return ModeRun(label, mode, {"sglang": "0", "batches": batches, "timings": timings}, list(backends))


class FakeRunner:
    def __init__(self, *likely):
        self.likely = list(likely)
        self.asked = []

    def next_logprobs(self, spec, prompts):
        assert spec.algorithm == "none"
        self.asked += prompts
        return self.likely


def served(mode=Mode.ON, verifier=None, **change):
    call = make_call()
    slot = make_slot(mode, calls=[call], verifier=verifier)
    slot(*call._replace(**change))
    return report_of(slot)


def test_equal_runs_agree_and_ask_no_engine(capsys):
    runner = FakeRunner()
    runs = [finished("off", "off"), finished("on", "on", [served()])]
    comparison = Comparison.of(spec(), runs, runner, 0.1)
    assert comparison.agrees and not runner.asked
    print_comparison(comparison)
    out = capsys.readouterr().out
    assert "6 of 6 answers have the tokens of off" in out and "2.00 (10.0x)" in out


@pytest.mark.parametrize(
    ("likely", "agrees", "verdict"),
    [
        ({"7": -1.0, "9": -1.04}, True, "near tie"),
        ({"7": -1.0, "9": -1.5}, False, "NOT a tie"),
        ({"7": -1.0}, False, "not among the likeliest"),
    ],
)
def test_a_divergence_is_explained_by_the_logit_gap(likely, agrees, verdict, capsys):
    runner = FakeRunner(likely)
    runs = [finished("off", "off"), finished("on", "on", [served()], change=(1, 1, 2, 9))]
    comparison = Comparison.of(spec(), runs, runner, 0.1)
    prompt = churn_batches(spec())[1][1]
    assert runner.asked == [[*prompt, 5, 6]]
    assert comparison.agrees is agrees
    print_comparison(comparison)
    out = capsys.readouterr().out
    assert "batch 1 request 1, token 2: 7 or 9" in out and verdict in out


def test_an_answer_that_ends_early_differs():
    short = finished("on", "on")
    short.result["batches"][0][0].pop()
    (found,) = divergences(spec(), finished("off", "off"), short)
    assert (found.position, found.token, found.other) == (3, 8, -1)


@pytest.mark.parametrize(
    ("run", "fault"),
    [
        (finished("on", "on"), "not live"),
        (finished("on", "on", [served(sinks=torch.zeros(2))]), "declined"),
        (finished("on", "on", [served(verifier=FakeVerifier(error=ValueError("x")))]), "errors"),
        (finished("v", "validate", [served(Mode.VALIDATE, FakeVerifier(offset=1.0))]), "1 mismatches"),
        (finished("on", "on", [{"rank": "tp0", "mode": "on", "declined": "not_mla"}]), "not taken"),
        (finished("off-2", "off", [served()]), "left a counter file"),
    ],
    ids=["absent", "declined", "errors", "mismatch", "not-taken", "off-leaves-a-trace"],
)
def test_what_is_a_fault(run, fault):
    comparison = Comparison.of(spec(), [finished("off", "off"), run], FakeRunner(), 0.1)
    assert not comparison.agrees and any(fault in text for text in comparison.faults)
    json.dumps(comparison.as_json())


def rank(name, eager_calls=4, **change):
    report = served()
    return {**report, "rank": name, "counters": {**report["counters"], "eager_calls": eager_calls, **change}}


@pytest.mark.parametrize(
    ("backends", "accepted", "fault"),
    [
        ([rank("tp0"), rank("tp1")], {"tp0": {"steps": 3, "hash": "a"}, "tp1": {"steps": 3, "hash": "a"}}, None),
        ([rank("tp0")], {"tp0": {"steps": 3, "hash": "a"}, "tp1": {"steps": 3, "hash": "a"}}, "no report of tp1"),
        (
            [rank("tp0"), rank("tp1", 3)],
            {"tp0": {"steps": 3, "hash": "a"}, "tp1": {"steps": 3, "hash": "a"}},
            "different numbers of calls",
        ),
        (
            [rank("tp0"), rank("tp1", errors={"ValueError": 1})],
            {"tp0": {"steps": 3, "hash": "a"}, "tp1": {"steps": 3, "hash": "a"}},
            "tp1: errors",
        ),
        ([rank("tp0"), rank("tp1")], {"tp0": {"steps": 3, "hash": "a"}}, "tp1 did not say"),
        (
            [rank("tp0"), rank("tp1")],
            {"tp0": {"steps": 3, "hash": "a"}, "tp1": {"steps": 3, "hash": "b"}},
            "accepted different tokens",
        ),
    ],
    ids=["agree", "silent-rank", "calls", "alone", "no-hash", "tokens"],
)
def test_ranks_must_all_be_ours_and_agree(backends, accepted, fault):
    run = ModeRun("on", "on", {}, backends, accepted)
    found = list(faults_of(run, spec("--tp", "2")))
    assert not found if fault is None else any(fault in text for text in found), found
