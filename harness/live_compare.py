"""What two live runs say differently: tokens, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.live_prompts import churn_batches, repeated_batch, timed_prompt
from harness.live_run import ModeRun
from harness.live_spec import LiveSpec

Json = dict[str, Any]


@dataclass(frozen=True)
class Divergence:
    """The first token that differs in one answer; `prompt` is all that came before it."""

    where: str
    position: int
    token: int
    other: int
    prompt: list[int]


@dataclass(frozen=True)
class Explained:
    """A divergence and how far apart its two tokens are for a plain engine; None: not among its likeliest."""

    divergence: Divergence
    gap: float | None

    def is_near_tie(self, tie: float) -> bool:
        return self.gap is not None and self.gap <= tie

    def as_json(self) -> Json:
        at = self.divergence
        return {
            "where": at.where,
            "position": at.position,
            "token": at.token,
            "other": at.other,
            "logit_gap": self.gap,
        }


def divergences(spec: LiveSpec, base: ModeRun, other: ModeRun) -> list[Divergence]:
    """The answers of `other` that are not those of `base`."""
    found = []
    for where, prompt, tokens in _answers(spec, base):
        theirs = _tokens(other, where)
        if tokens == theirs:
            continue
        at = next((i for i, (a, b) in enumerate(zip(tokens, theirs, strict=False)) if a != b), None)
        if at is None:  # one ends early: its missing token has no number
            at = min(len(tokens), len(theirs))
            found.append(Divergence(where, at, _or(tokens, at), _or(theirs, at), prompt + tokens[:at]))
        else:
            found.append(Divergence(where, at, tokens[at], theirs[at], prompt + tokens[:at]))
    return found


def explain(found: list[Divergence], logprobs: list[dict[str, float]]) -> list[Explained]:
    """Join divergences with what a plain engine thinks of their tokens."""
    return [Explained(at, _gap(at, likely)) for at, likely in zip(found, logprobs, strict=True)]


def answers(run: ModeRun) -> int:
    """How many answers a run gave."""
    batches, repeated = run.result["batches"], run.result.get("repeats", {}).get("tokens", [])
    return sum(len(batch) for batch in batches) + len(repeated) + len(run.result["timings"])


def _gap(at: Divergence, likely: dict[str, float]) -> float | None:
    first, second = likely.get(str(at.token)), likely.get(str(at.other))
    return None if first is None or second is None else abs(first - second)


def _answers(spec: LiveSpec, run: ModeRun) -> list[tuple[str, list[int], list[int]]]:
    found = []
    for b, (prompts, outputs) in enumerate(zip(churn_batches(spec), run.result["batches"], strict=True)):
        for i, (prompt, tokens) in enumerate(zip(prompts, outputs, strict=True)):
            found.append((f"batch {b} request {i}", prompt, tokens))
    if "repeats" in run.result:
        repeated = zip(repeated_batch(spec), run.result["repeats"]["tokens"], strict=True)
        found += [(f"repeated request {i}", prompt, tokens) for i, (prompt, tokens) in enumerate(repeated)]
    for timing in run.result["timings"]:
        length = timing["length"]
        found.append((f"length {length}", timed_prompt(spec, length), timing["tokens"]))
    return found


def _tokens(run: ModeRun, where: str) -> list[int]:
    kind, number, *rest = where.split()
    if kind == "batch":
        return list(run.result["batches"][int(number)][int(rest[1])])
    if kind == "repeated":
        return list(run.result["repeats"]["tokens"][int(rest[0])])
    return next(list(t["tokens"]) for t in run.result["timings"] if t["length"] == int(number))


def _or(tokens: list[int], at: int) -> int:
    return tokens[at] if at < len(tokens) else -1
