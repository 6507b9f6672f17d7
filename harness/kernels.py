"""Runs the kernels for a replay: one Verifier a shape, poisoned outputs and workspace, results in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from captured_tensors import CaptureCase
from harness.devices import Device
from harness.errors import UsageError
from verify_numba import Parts, Verifier, VerifyBatch, VerifyInputError
from verify_numba.dims import D_V

FORMS = ("auto", "cluster", "single")


class Backend(Protocol):
    """What a replay needs of a Verifier; tests put one with planted errors in its place."""

    def poison_workspace(self) -> None: ...

    def verify(self, batch: VerifyBatch, out: Any, lse: Any, *, parts: Parts) -> None: ...


MakeBackend = Callable[[CaptureCase], Backend]


@dataclass(frozen=True)
class Result:
    """out [N, H, D_V] bf16, natural-log lse [N, H] float32, and the seconds of the call that wrote them."""

    out: NDArray
    lse: NDArray
    seconds: float


class KernelFault(Exception):
    """A kernel run ended with an error of its own: a GPU fault, or a rule broken in a CPU run."""


class SettingRefused(UsageError):
    """A setting that no case can run with."""


class Verifiers:
    """Makes a Verifier for each shape (requests, draft budget, heads) once, warmed up.

    Raises UsageError where this machine cannot run the kernels, VerifyInputError where they refuse the shape,
    SettingRefused where they refuse a setting.
    """

    def __init__(
        self, device: Device, *, nsplit: int | None = None, form: str = "auto", lanes_arrive: bool = False
    ):
        self._settings: dict[str, Any] = {
            "device": device.name,
            "nsplit": nsplit,
            "form": form,
            "lanes_arrive": lanes_arrive,
        }
        self._made: dict[tuple[int, int, int], Verifier] = {}

    def __call__(self, case: CaptureCase) -> Verifier:
        shape = (max(case.bs, 1), case.T, case.H)
        if shape not in self._made:
            max_bs, T, H = shape
            try:
                verifier = Verifier(max_bs=max_bs, T=T, H=H, **self._settings)
                verifier.warmup()
            except VerifyInputError as error:
                if error.field in self._settings:
                    raise SettingRefused(f"--{error}") from error
                raise
            except RuntimeError as error:
                raise UsageError(f"the kernels cannot run here: {error}") from error
            self._made[shape] = verifier
        return self._made[shape]


def run_kernels(backend: Backend, batch: VerifyBatch, device: Device, parts: Parts) -> Result:
    """One call of `verify` on a batch that lies on `device`; what it fails to write stays NaN.

    Raises KernelFault where the call or the device reports an error.
    """
    N, H = batch.q.shape[:2]
    try:
        out = device.poisoned((N, H, D_V), bfloat16)
        lse = device.poisoned((N, H), np.float32)
        backend.poison_workspace()
        seconds = device.timed(lambda: backend.verify(batch, out, lse, parts=parts))
        return Result(device.get(out), device.get(lse), seconds)
    except RuntimeError as error:  # verify_numba's own, and torch's for a fault that a copy back meets
        raise KernelFault(f"{type(error).__name__}: {error}") from error
