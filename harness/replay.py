"""Replays one captured step: the kernels and the captured output against the oracle, part by part."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from captured_tensors import CaptureCase
from harness.case_batch import device_batch, host_batch
from harness.comparison import Comparison, Subject
from harness.devices import Device
from harness.judge import PART_NAMES, answer, judge_captured, judge_kernels, judge_permuted
from harness.kernels import KernelFault, MakeBackend, Result, run_kernels
from harness.trees import parent_after_child
from verify_numba import Parts, check_values


class Verdict(enum.Enum):
    """Which side is off against the oracle."""

    PASS = "pass"
    KERNELS_OFF = "kernels off"
    CAPTURED_OFF = "captured output off"
    BOTH_OFF = "kernels and captured output off"

    @property
    def kernels_off(self) -> bool:
        return self in (Verdict.KERNELS_OFF, Verdict.BOTH_OFF)

    @property
    def captured_off(self) -> bool:
        return self in (Verdict.CAPTURED_OFF, Verdict.BOTH_OFF)


@dataclass(frozen=True)
class Options:
    """How to replay. With `permute_seed` the whole step runs again with every row at another slot."""

    permute_seed: int | None = None

    @property
    def steps(self) -> int:
        """Kernel runs a case."""
        return len(PART_NAMES) + (self.permute_seed is not None)


@dataclass(frozen=True)
class CaseReport:
    """Everything that one replay found. `seconds` is one call of the kernels by part, not a benchmark.

    `faults` are kernel runs that ended with an error instead of a result.
    """

    name: str
    path: Path
    bs: int
    N: int
    T: int
    H: int
    prefix_lengths: tuple[int, ...]
    draft_lengths: tuple[int, ...]
    has_captured_output: bool
    comparisons: tuple[Comparison, ...]
    faults: tuple[str, ...]
    seconds: dict[str, float]
    total_seconds: float
    notes: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[Comparison, ...]:
        return tuple(c for c in self.comparisons if not c.passed)

    @property
    def verdict(self) -> Verdict:
        """Kernels against captured output has no say: they differ too much only where one of them is off."""
        to_blame = {c.check.subject for c in self.failures if c.check.reference is not Subject.CAPTURED}
        kernels = bool(self.faults) or bool(to_blame & {Subject.KERNELS, Subject.PERMUTED})
        if Subject.CAPTURED in to_blame:
            return Verdict.BOTH_OFF if kernels else Verdict.CAPTURED_OFF
        return Verdict.KERNELS_OFF if kernels else Verdict.PASS


def replay(
    case: CaptureCase,
    path: Path,
    make_backend: MakeBackend,
    device: Device,
    options: Options,
    advance: Callable[[], None] = lambda: None,
) -> CaseReport:
    """Replay one case; `advance` is called after each of `options.steps` kernel runs.

    Raises VerifyInputError where the kernels refuse the case, UsageError where no answer is finite.
    """
    start = time.perf_counter()
    batch = host_batch(case)
    check_values(batch)
    backend = make_backend(case)
    on_device = device_batch(batch, device)
    answers = {parts: answer(batch, parts) for parts in PART_NAMES}
    results: dict[Parts, Result] = {}
    comparisons: list[Comparison] = []
    faults = []
    for parts, right in answers.items():
        try:
            results[parts] = run_kernels(backend, on_device, device, parts)
            comparisons += judge_kernels(results[parts], right)
        except KernelFault as fault:
            faults.append(f"kernels {right.part}: {fault}")
        advance()
    whole, right = results.get(Parts.ALL), answers[Parts.ALL]
    comparisons += judge_captured(case, whole, right)
    if options.permute_seed is not None and whole is not None:
        try:
            moved = device_batch(host_batch(case, permute_seed=options.permute_seed), device)
            permuted = run_kernels(backend, moved, device, Parts.ALL)
            comparisons += judge_permuted(permuted, whole, right)
        except KernelFault as fault:
            faults.append(f"slots permuted: {fault}")
        advance()
    return CaseReport(
        name=case.name,
        path=path,
        bs=case.bs,
        N=case.N,
        T=case.T,
        H=case.H,
        prefix_lengths=case.prefix_lengths,
        draft_lengths=case.draft_lengths,
        has_captured_output=case.out_triton is not None,
        comparisons=tuple(comparisons),
        faults=tuple(faults),
        seconds={PART_NAMES[parts]: result.seconds for parts, result in results.items()},
        total_seconds=time.perf_counter() - start,
        notes=tuple(_notes(case)),
    )


def _notes(case: CaptureCase) -> Iterator[str]:
    if case.out_triton is None:
        yield "no captured output: only the kernels are judged"
    late = [b for b in range(case.bs) if parent_after_child(case.tree_mask(b))]
    if late:
        yield (
            f"in request {', '.join(map(str, late))} a token sees one with a larger index; "
            "SGLang's Triton kernel may cut such keys off"
        )
