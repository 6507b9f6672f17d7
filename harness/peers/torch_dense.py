"""Plain torch: gather the rows, two matrix products and a softmax; a sanity peer without any fused kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.bench_inputs import Requests, Workload
from harness.peers.base import Contender, Output, PeerRefused
from verify_numba.dims import D_V

MAX_SCORE_BYTES = 4 << 30


class TorchDense:
    """Scores in float32, probabilities in bf16, as eager attention in model code does it."""

    name = "torch"

    def available(self, device: torch.device) -> str | None:
        return None

    def prepare(self, work: Workload) -> Contender:
        shape = work.shape
        scores = 4 * shape.T * shape.H * (max(shape.lengths) + shape.T)
        if scores > MAX_SCORE_BYTES:
            raise PeerRefused(f"its score matrix would take {scores / 1e9:.0f} GB")
        out = torch.empty(*work.q.shape[:2], D_V, dtype=work.q.dtype, device=work.device)
        calls = [_Call(work, requests, out) for requests in work.sets]
        return Contender(self.name, calls, Output(out))


class _Call:
    def __init__(self, work: Workload, requests: Requests, out: Tensor) -> None:
        self._work, self._requests, self._out = work, requests, out

    def __call__(self) -> None:
        T = self._work.shape.T
        for b, slots in enumerate(self._requests):
            rows = slice(b * T, (b + 1) * T)
            self._out[rows] = _attend(
                self._work.q[rows],
                self._work.pool[slots, 0],
                self._work.tree[b],
                self._work,
            )


def _attend(q: Tensor, keys: Tensor, tree: Tensor, work: Workload) -> Tensor:
    """q [T, H, D_QK], keys [L + T, D_QK], tree [T, T] bool -> [T, H, D_V]."""
    T, H, _ = q.shape
    scores = (q.reshape(T * H, -1) @ keys.T).float() * work.sm_scale
    scores[:, -T:].masked_fill_(~tree.repeat_interleave(H, dim=0), -torch.inf)
    return (torch.softmax(scores, dim=-1).bfloat16() @ keys[:, :D_V]).view(T, H, D_V)
