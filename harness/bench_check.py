"""The check before every timing: attention in float64 on the device that is measured.

The limit is derived, not chosen: the reference is computed a second time with its probabilities and its output
rounded to bf16, as any bf16 tensor-core kernel must; a contender may be off by twice what that rounding costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from verify_numba.dims import D_V

KEY_CHUNK = 8192
ALLOWED_FACTOR = 2.0
LAG = 4 / 3
"""Scale of probabilities before they are rounded: a running maximum may lag, so that a dominant probability is not
exactly one; at 4/3 its rounding is about as bad as it gets."""
PEER_REL_NORM, PEER_WORST_ROW = 5e-2, 15e-2
"""Limits for peers: enough to see a wrong key or mask, wide enough for scores rounded to bf16."""
LSE_LIMIT = 2.0**-9
"""Natural-log LSE: half a bf16 ulp, what a row sum over bf16 probabilities may lose."""


@dataclass(frozen=True)
class Reference:
    """One batch: `out` and `rounded` [N, H, D_V], `lse` [N, H], all float64; `rounded` has bf16 rounding in it."""

    out: Tensor
    lse: Tensor
    rounded: Tensor


@dataclass(frozen=True)
class Check:
    """Errors against float64 and the limits they are held to; `lse` is None where a contender gives none."""

    rel_norm: float
    worst_row: float
    lse: float | None
    rel_norm_limit: float
    worst_row_limit: float
    where: str

    @property
    def green(self) -> bool:
        """NaN anywhere makes it red."""
        return (
            self.rel_norm <= self.rel_norm_limit
            and self.worst_row <= self.worst_row_limit
            and (self.lse is None or self.lse <= LSE_LIMIT)
        )

    def __str__(self) -> str:
        lse = "none" if self.lse is None else f"{self.lse:.1e} (limit {LSE_LIMIT:.1e})"
        return (
            f"relative norm {self.rel_norm:.2e} (limit {self.rel_norm_limit:.2e}), "
            f"worst row {self.worst_row:.2e} at {self.where} (limit {self.worst_row_limit:.2e}), LSE {lse}"
        )

    def as_json(self) -> dict[str, Any]:
        return {**{k: _finite(v) for k, v in asdict(self).items()}, "green": self.green}


def reference(q: Tensor, pool: Tensor, slots: Sequence[Tensor], tails: Tensor, sm_scale: float) -> Reference:
    """Attention of every request in float64.

    q [N, H, D_QK]; pool [slots, 1, D_QK]; slots[b] [L_b + T] with the draft tokens last; tails [bs, T, T] bool.
    """
    T = tails.shape[1]
    parts = [
        _request(q[b * T : (b + 1) * T], pool, slots[b], tails[b], sm_scale) for b in range(tails.shape[0])
    ]
    return Reference(*(torch.cat([getattr(p, f) for p in parts]) for f in ("out", "lse", "rounded")))


def judge(out: Tensor, lse: Tensor | None, ref: Reference, peer: bool = False) -> Check:
    """Compare one batch's `out` [N, H, D_V] and natural-log `lse` [N, H] or None with its reference."""
    error, rows = _errors(out.double(), ref.out)
    limit, row_limits = _errors(ref.rounded, ref.out)
    worst = int(torch.nan_to_num(rows, nan=math.inf).argmax())
    return Check(
        rel_norm=error,
        worst_row=float(rows.flatten()[worst]),
        lse=None if lse is None else float((lse.double() - ref.lse).abs().max()),
        rel_norm_limit=PEER_REL_NORM if peer else ALLOWED_FACTOR * limit,
        worst_row_limit=PEER_WORST_ROW if peer else ALLOWED_FACTOR * float(row_limits.max()),
        where=f"token {worst // out.shape[1]}, head {worst % out.shape[1]}",
    )


def _errors(out: Tensor, ref: Tensor) -> tuple[float, Tensor]:
    difference = out - ref
    whole = difference.norm() / ref.norm()
    return float(whole), difference.norm(dim=-1) / ref.norm(dim=-1)


def _request(q: Tensor, pool: Tensor, slots: Tensor, tail: Tensor, sm_scale: float) -> Reference:
    T, H, _ = q.shape
    rows = q.reshape(T * H, -1).double() * sm_scale
    state = _Softmax(T * H, rows.device)
    for chunk in slots[:-T].split(KEY_CHUNK) if slots.numel() > T else ():
        state.add(rows, pool[chunk, 0].double(), None)
    state.add(rows, pool[slots[-T:], 0].double(), tail.repeat_interleave(H, dim=0))
    return state.finish(T, H)


class _Softmax:
    """Online softmax over chunks of keys, plain and with bf16 probabilities side by side."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.top = torch.full((rows, 1), -math.inf, dtype=torch.float64, device=device)
        self.sum = torch.zeros(rows, 1, dtype=torch.float64, device=device)
        self.out = torch.zeros(rows, D_V, dtype=torch.float64, device=device)
        self.rounded = torch.zeros_like(self.out)

    def add(self, rows: Tensor, keys: Tensor, visible: Tensor | None) -> None:
        scores = rows @ keys.T
        if visible is not None:
            scores = scores.masked_fill(~visible, -math.inf)
        top = torch.maximum(self.top, scores.amax(dim=1, keepdim=True))
        decay = torch.exp(self.top - top)
        p = torch.exp(scores - top)
        values = keys[:, :D_V]
        self.sum = self.sum * decay + p.sum(dim=1, keepdim=True)
        self.out = self.out * decay + p @ values
        self.rounded = self.rounded * decay + (LAG * p).bfloat16().double() @ values / LAG
        self.top = top

    def finish(self, T: int, H: int) -> Reference:
        rounded = (self.rounded / self.sum).bfloat16().double()
        return Reference(
            out=(self.out / self.sum).view(T, H, D_V),
            lse=(self.top + self.sum.log()).view(T, H),
            rounded=rounded.view(T, H, D_V),
        )


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
