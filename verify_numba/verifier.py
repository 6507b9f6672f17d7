"""The one door to the kernels: validate, then launch what was planned and compiled beforehand."""

from __future__ import annotations

import re
from typing import Any, Protocol

from verify_numba.batch import Parts, VerifyBatch
from verify_numba.binding import Binder, Bound
from verify_numba.errors import VerifyInputError
from verify_numba.plan import VerifyPlan, make_plan

LOG2_E = 1.4426950408889634


class Executor(Protocol):
    """Runs the two kernels of a plan: on a GPU, or in lockstep on the CPU."""

    plan: VerifyPlan
    device: int

    def warmup(self) -> None: ...

    def run(self, bound: Bound, parts: int, batch: VerifyBatch, out: Any, lse: Any | None) -> None: ...

    def poison_workspace(self) -> None: ...


class Verifier:
    """Tree-verify attention for batches of up to `max_bs` requests of up to `T` draft tokens and `H` heads.

    Args:
        max_bs, T, H: what the workspace is made for (T at most 64, H at most 128).
        device: "cuda:N", "cpu", or "auto" (the first GPU that torch sees, else the CPU).
        nsplit: how many workers share the key tiles; the plan's rule by default.
        form: "cluster", "single" or "auto" (docs/design.md).
        lanes_arrive: every lane arrives at barriers for itself: slower, for compute-sanitizer's racecheck, which does
            not follow a warp's barrier to the arrival behind it. Changes no result; on the CPU, nothing but a name.

    Raises:
        VerifyInputError: an argument is out of range.
        CudaUnavailable, UnsupportedKernel, CompileError, CudaError: the GPU cannot be used; see verify_numba.gpu.
    """

    def __init__(
        self, *, max_bs: int, T: int, H: int, device: str = "auto", nsplit: int | None = None, form: str = "auto",
        lanes_arrive: bool = False,
    ):  # fmt: skip
        sizes: dict[str, Any] = {
            "max_bs": max_bs, "T": T, "H": H, "nsplit": nsplit, "form": form, "lanes_arrive": lanes_arrive,
        }  # fmt: skip
        ordinal = _ordinal(device)
        self._executor: Executor
        if ordinal < 0:
            from verify_numba.executor_cpu import CPU_LIKE, CpuExecutor

            self._executor = CpuExecutor(make_plan(**sizes, **CPU_LIKE))
        else:
            from verify_numba.executor_gpu import GpuExecutor
            from verify_numba.gpu.kernel_set import kernel_set

            kernels = kernel_set(ordinal)
            self._executor = GpuExecutor(make_plan(**sizes, cc=kernels.gpu.cc, sm_count=kernels.gpu.sm_count), kernels)
        self._binder = Binder(max_bs=max_bs, T=T, H=H, device=ordinal)

    @property
    def plan(self) -> VerifyPlan:
        return self._executor.plan

    def warmup(self) -> None:
        """Compile (or fetch from the cache) and load the kernels. Needed before a CUDA graph capture."""
        self._executor.warmup()

    def verify(self, batch: VerifyBatch, out: Any, lse: Any | None = None, *, parts: Parts = Parts.ALL) -> None:
        """Attention of every draft token over its prefix and over the draft tokens that its mask row allows.

        Args:
            batch: docs/design.md and `VerifyBatch`.
            out: [N, H, D_V] (or [N, H * D_V]) bf16, contiguous; overwritten.
            lse: [N, H] float32, natural logarithm, contiguous, overwritten; or None.
            parts: which keys take part.

        A row that sees no key gets out = 0 and lse = -inf. Allocates nothing and never waits: on a GPU it launches two
        kernels on torch's current stream. One Verifier serves one stream at a time, since its workspace is shared.
        Slots and indptrs are not read here; `check_values` does that.

        Raises:
            VerifyInputError: before any launch, naming the field.
            ColdLaunchError: a graph is being captured and `warmup` was not called.
        """
        if type(parts) is not Parts:
            raise VerifyInputError("parts", repr(parts), "a Parts")
        bound = self._binder.bind(batch, out, lse)
        if bound[0].N:
            self._executor.run(bound, parts._value_, batch, out, lse)

    def poison_workspace(self) -> None:
        """Fill the workspace with NaN: a result that depends on what an earlier step left there shows."""
        self._executor.poison_workspace()


def _ordinal(device: str) -> int:
    name = str(device)  # torch.device has these names too
    if name == "cpu":
        return -1
    if name == "auto":
        return 0 if _torch_sees_gpu() else -1
    match = re.fullmatch(r"cuda(?::(\d{1,4}))?", name, re.ASCII)
    if match is None:
        raise VerifyInputError("device", repr(device), "'auto', 'cpu' or 'cuda:N'")
    return int(match[1] or 0)


def _torch_sees_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())
