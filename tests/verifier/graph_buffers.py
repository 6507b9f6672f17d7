"""The static buffers of a captured step, as a server has them: filled anew before every replay, larger than needed."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.trees import tree_mask
from tests.verifier.calls import Call
from verify_numba import VerifyBatch
from verify_numba.dims import D_QK, D_V

SM_SCALE = 0.13


class GraphBuffers:
    """`max_bs` requests of `T` draft tokens and prefixes of up to `longest`; addresses never change.

    `fill` writes a step: requests beyond those given are padding, of length 1 on slot 0, the sink, which holds NaN. So
    do all slots that no request owns, and what lies behind the last request in kv_indices names such slots.
    """

    def __init__(self, device: Any, *, max_bs: int, T: int, H: int, longest: int):
        import torch

        self.max_bs, self.T, self.H = max_bs, T, H
        N, self.slots = max_bs * T, max_bs * longest + 64
        bf16 = {"dtype": torch.bfloat16, "device": device}
        int64 = {"dtype": torch.int64, "device": device}
        self.call = Call(
            VerifyBatch(
                q=torch.zeros(N, H, D_QK, **bf16),
                k=torch.zeros(N, 1, D_QK, **bf16),
                kv_pool=torch.zeros(self.slots, 1, D_QK, **bf16),
                qo_indptr=torch.arange(max_bs + 1, **int64) * T,
                kv_indptr=torch.zeros(max_bs + 1, dtype=torch.int32, device=device),
                kv_indices=torch.zeros(self.slots, **int64),
                custom_mask=torch.zeros(max_bs * T * (longest + T), dtype=torch.uint8, device=device),
                mask_indptr=torch.zeros(max_bs + 1, **int64),
                sm_scale=SM_SCALE,
            ),
            torch.zeros(N, H, D_V, **bf16),
            torch.zeros(N, H, dtype=torch.float32, device=device),
        )

    def fill(self, lengths: tuple[int, ...], seed: int) -> None:
        """A step whose first requests have these prefix lengths; the rest is padding."""
        import torch

        b = self.call.batch
        rng, device = np.random.default_rng(seed), b.q.device
        gen = torch.Generator(device).manual_seed(seed)
        padded = np.array([*lengths, *[1] * (self.max_bs - len(lengths))])
        owned, total = sum(lengths), int(padded.sum())
        order = 1 + torch.randperm(self.slots - 1, generator=gen, device=device)
        b.kv_pool.fill_(float("nan"))
        b.kv_pool[order[:owned]] = torch.randn((owned, 1, D_QK), generator=gen, device=device).bfloat16()
        b.q.normal_(generator=gen)
        b.k.normal_(generator=gen)
        stale = order[owned:][torch.randint(len(order) - owned, (self.slots,), generator=gen, device=device)]
        b.kv_indices.copy_(stale)
        b.kv_indices[:owned] = order[:owned]
        b.kv_indices[owned:total] = 0
        b.kv_indptr.copy_(torch.from_numpy(np.concatenate([[0], padded.cumsum()])))
        b.custom_mask.random_(0, 2, generator=gen)
        starts = np.concatenate([[0], (self.T * (padded + self.T)).cumsum()])
        starts[-1] = 0
        b.mask_indptr.copy_(torch.from_numpy(starts))
        self.masks = []
        for start, length in zip(starts, lengths, strict=False):
            mask = torch.from_numpy(tree_mask(rng, self.T, "shuffled")).to(device)
            rows = b.custom_mask[start : start + self.T * (length + self.T)].view(self.T, length + self.T)
            rows[:, length:] = mask
            self.masks.append(mask)
        self.lengths = lengths
        self.poison()

    def poison(self) -> None:
        """NaN in the results."""
        self.call.out.fill_(float("nan"))
        self.call.lse.fill_(float("nan"))

    def results(self) -> tuple[Any, Any]:
        """Copies of out and lse as integers."""
        import torch

        return self.call.out.clone().view(torch.int16), self.call.lse.clone().view(torch.int32)

    def exact(self, request: int) -> tuple[Any, Any]:
        """out [T, H, D_V] and lse [T, H] of one request in float64, plainly."""
        import torch

        b, mask = self.call.batch, self.masks[request]
        tokens = slice(request * self.T, (request + 1) * self.T)
        first = sum(self.lengths[:request])
        slots = b.kv_indices[first : first + self.lengths[request]]
        keys = torch.cat([b.kv_pool[slots, 0], b.k[tokens, 0]]).double()
        scores = SM_SCALE * torch.einsum("thd,jd->thj", b.q[tokens].double(), keys)
        visible = torch.cat([torch.ones(self.T, len(slots), dtype=torch.bool, device=mask.device), mask], 1)
        scores.masked_fill_(~visible[:, None], float("-inf"))
        return torch.softmax(scores, -1) @ keys[:, :D_V], torch.logsumexp(scores, -1)
