"""Stands in for the kernels in tests of the harness: the oracle's ideal bf16 kernel, with errors planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from captured_tensors import DEFAULT_CASES, CaptureCase, load_case
from oracle import bf16_verify_batch
from verify_numba import Parts, VerifyBatch

SMALL_CASE = DEFAULT_CASES.parent / "ngram-bs2-t9-prefix24_63-layer0.safetensors"

Plant = Callable[[VerifyBatch, Any, Any], None]
"""Changes out and lse in place after they were written."""


def nothing(batch: VerifyBatch, out: Any, lse: Any) -> None:
    """No error planted."""


@dataclass
class FakeVerifier:
    """Has what a replay needs of a Verifier, and counts how often the workspace was poisoned."""

    plant: Plant = nothing
    only: Parts | None = None
    alter: Callable[[VerifyBatch], VerifyBatch] = lambda batch: batch
    poisoned: int = 0
    found_poison: bool = True

    def poison_workspace(self) -> None:
        self.poisoned += 1

    def verify(self, batch: VerifyBatch, out: Any, lse: Any, *, parts: Parts = Parts.ALL) -> None:
        self.found_poison &= bool(np.isnan(out.astype(np.float32)).all() and np.isnan(lse).all())
        out[...], lse[...] = bf16_verify_batch(self.alter(batch), parts)
        if self.only in (None, parts):
            self.plant(batch, out, lse)


def small_case(**changes: Any) -> CaptureCase:
    """The smallest shipped batch of two requests (18 draft tokens, 8 heads), with fields replaced."""
    return replace(load_case(SMALL_CASE), **changes)
