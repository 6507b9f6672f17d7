"""Verify calls built by hand on the CPU, and stand-ins for the two kernels that serve them."""

from __future__ import annotations

import torch

from sglang_glue.backend import BackendFacts, SlotCall
from verify_numba.dims import D_QK, D_V

SM_SCALE = 0.07
SLOTS = 64


def make_call(
    lengths=(5, 9),
    T=4,
    H=2,
    *,
    seed=0,
    tree=True,
    slots=SLOTS,
    mask_dtype=torch.bool,
    index_dtype=torch.int32,
) -> SlotCall:
    """An eligible call: scattered slots, a random tree, stale tails behind kv_indices and the mask."""
    generator = torch.Generator().manual_seed(seed)
    N = len(lengths) * T

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    pool, k = normal(slots, 1, D_QK), normal(N, 1, D_QK)
    used = torch.randperm(slots - 1, generator=generator)[: sum(lengths)] + 1
    stale = torch.full((3,), slots * 1000)
    masks = [_mask(length, T, generator) for length in lengths]
    sizes = torch.tensor([mask.numel() for mask in masks])
    return SlotCall(
        q=normal(N, H, D_QK),
        k=k,
        v=k[..., :D_V].contiguous(),
        o=torch.full((N, H, D_V), float("nan"), dtype=torch.bfloat16),
        k_buffer=pool,
        v_buffer=pool[..., :D_V],
        qo_indptr=torch.arange(0, N + 1, T).to(index_dtype),
        kv_indptr=torch.tensor([0, *torch.tensor(lengths).cumsum(0)]).to(torch.int32),
        kv_indices=torch.cat([used, stale]),
        custom_mask=torch.cat([*masks, torch.ones(5, dtype=torch.bool)]).to(mask_dtype) if tree else None,
        causal=True,
        mask_indptr=torch.tensor([0, *sizes.cumsum(0)]) if tree else None,
        max_extend_len=T,
        k_descale=1.0,
        v_descale=1.0,
        sm_scale=SM_SCALE,
    )


def _mask(length: int, T: int, generator: torch.Generator) -> torch.Tensor:
    tree = torch.eye(T, dtype=torch.bool)
    for token in range(1, T):
        tree[token] |= tree[int(torch.randint(token, (1,), generator=generator))]
    return torch.cat([torch.ones(T, length, dtype=torch.bool), tree], dim=1).flatten()


def attend(call: SlotCall, out: torch.Tensor) -> None:
    """The whole attention in float32, one request at a time; plays Triton, and ours too."""
    for b in range(call.bs):
        rows = slice(int(call.qo_indptr[b]), int(call.qo_indptr[b + 1]))
        start, end = int(call.kv_indptr[b]), int(call.kv_indptr[b + 1])
        T, length = rows.stop - rows.start, end - start
        keys = torch.cat([call.k_buffer[call.kv_indices[start:end]], call.k[rows]])[:, 0].float()
        seen = torch.ones(T, length + T, dtype=torch.bool, device=call.q.device)
        seen[:, length:] = _tree_of(call, b, T, length)
        scores = torch.einsum("thd,jd->thj", call.q[rows].float(), keys) * call.sm_scale
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        out[rows] = torch.einsum("thj,jd->thd", weights, keys[:, :D_V]).to(out.dtype)


def _tree_of(call: SlotCall, b: int, T: int, length: int) -> torch.Tensor:
    if call.custom_mask is None:
        return torch.ones(T, T, dtype=torch.bool, device=call.q.device).tril()
    start = int(call.mask_indptr[b])
    cells = call.custom_mask[start : start + T * (length + T)].bool()
    return cells.view(T, length + T)[:, length:]


class FakeVerifier:
    """Serves a `VerifyBatch` as `verify_numba.Verifier` does, with a chosen fault."""

    plan = "fake plan"

    def __init__(self, *, error: Exception | None = None, offset: float = 0.0) -> None:
        self.error = error
        self.offset = offset
        self.batches: list = []

    def warmup(self) -> None:
        pass

    def verify(self, batch, out, lse=None) -> None:
        self.batches.append(batch)
        if self.error is not None:
            raise self.error
        T = batch.q.shape[0] // (batch.qo_indptr.shape[0] - 1)
        call = SlotCall(
            batch.q, batch.k, batch.k[..., :D_V], out, batch.kv_pool, batch.kv_pool[..., :D_V], batch.qo_indptr,
            batch.kv_indptr, batch.kv_indices, batch.custom_mask, True, batch.mask_indptr, T, 1.0, 1.0, batch.sm_scale,
        )  # fmt: skip
        attend(call, out)
        out += self.offset


def make_facts(**changes) -> BackendFacts:
    facts = {
        "is_target": True, "use_mla": True, "page_size": 1, "deterministic": False, "dcp_size": 1, "device": "cpu",
        "max_bs": 8, "T": 4, "H": 2, "layer_of": {}, "pool_slots": SLOTS, "algorithm": "ngram", "rank": "tp0",
        "tp_size": 1, "model": "DeepseekV3ForCausalLM, 4 layers",
    }  # fmt: skip
    return BackendFacts(**{**facts, **changes})
