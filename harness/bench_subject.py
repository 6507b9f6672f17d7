"""Our kernels as a contender: the same `Verifier.verify` that replay and live serving call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import verify_numba
from harness.bench_inputs import Workload
from harness.peers.base import TREE, Contender, Output
from verify_numba.dims import D_V

NAME = "verify-numba"


@dataclass(frozen=True)
class Variant:
    """A setting of the plan: `nsplit` None lets the plan choose, `form` as in `Verifier`."""

    nsplit: int | None = None
    form: str = "auto"

    def __str__(self) -> str:
        split = "auto" if self.nsplit is None else str(self.nsplit)
        return f"nsplit {split}" + ("" if self.form == "auto" else f", {self.form}")

    def as_json(self) -> dict[str, Any]:
        return {"nsplit": self.nsplit, "form": self.form}


def prepare_subject(work: Workload, variant: Variant) -> tuple[Contender, str]:
    """A warmed-up verifier bound to `work`, and its plan as text. Raises ValueError where the plan refuses."""
    shape = work.shape
    verifier = verify_numba.Verifier(
        max_bs=shape.bs,
        T=shape.T,
        H=shape.H,
        device=_device_name(work.device),
        nsplit=variant.nsplit,
        form=variant.form,
    )
    verifier.warmup()
    rows = work.q.shape[:2]
    out = torch.empty(*rows, D_V, dtype=work.q.dtype, device=work.device)
    lse = torch.empty(rows, dtype=torch.float32, device=work.device)
    calls = [_call(verifier, make_batch(work, index), out, lse) for index in range(work.n_sets)]
    return Contender(NAME, calls, Output(out, lse), TREE), str(verifier.plan)


def make_batch(work: Workload, index: int) -> verify_numba.VerifyBatch:
    """The batch that reads slot set `index`."""
    return verify_numba.VerifyBatch(
        q=work.q,
        k=work.k,
        kv_pool=work.pool,
        qo_indptr=work.qo_indptr,
        kv_indptr=work.kv_indptr,
        kv_indices=work.kv_indices[index],
        custom_mask=work.custom_mask,
        mask_indptr=work.mask_indptr,
        sm_scale=work.sm_scale,
    )


def _call(
    verifier: verify_numba.Verifier, batch: verify_numba.VerifyBatch, out: torch.Tensor, lse: torch.Tensor
) -> Callable[[], None]:
    return lambda: verifier.verify(batch, out, lse)


def _device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"
