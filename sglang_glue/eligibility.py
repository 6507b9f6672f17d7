"""Which backends and which calls are ours: two tables of (reason, predicate). The first reason that holds declines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_glue.backend import BackendFacts, SlotCall
from verify_numba.dims import D_QK, D_V

MAX_T = 64
MAX_H = 128

RANK_FALLBACK = "rank_fallback"
"""Counted for eager calls after an error of ours on some rank (`sglang_glue.ranks`); not a property of the call."""


@dataclass(frozen=True)
class Limits:
    """What the verifier was built for."""

    max_bs: int
    T: int
    H: int


BACKEND_DECLINES: tuple[tuple[str, Callable[[BackendFacts], bool]], ...] = (
    ("not_mla", lambda b: not b.use_mla),
    ("kv_pool", lambda b: not b.layer_of),
    ("page_size", lambda b: b.page_size != 1),
    ("deterministic", lambda b: b.deterministic),  # forward_extend leaves before the slot
    ("dcp", lambda b: b.dcp_size != 1),  # the same
    ("draft_tokens", lambda b: b.T > MAX_T),
    ("heads", lambda b: b.H > MAX_H),
)
"""Asked once, when the backend is built. A declined backend is left exactly as SGLang made it."""

CALL_DECLINES: tuple[tuple[str, Callable[[SlotCall, Limits], bool]], ...] = (
    ("empty", lambda c, _: c.bs < 1),
    ("batch_size", lambda c, n: c.bs > n.max_bs),
    ("draft_tokens", lambda c, n: not 1 <= c.max_extend_len <= n.T),
    ("ragged", lambda c, _: c.q.shape[0] != c.bs * c.max_extend_len),
    ("heads", lambda c, n: c.q.shape[1] != n.H),
    ("not_mla", lambda c, _: not _is_mla(c)),
    ("kv_dtype", lambda c, _: not _is_bf16(c.k_buffer)),
    ("dtype", lambda c, _: not (_is_bf16(c.q) and _is_bf16(c.k) and _is_bf16(c.o))),
    ("kv_scale", lambda c, _: c.k_descale != 1.0 or c.v_descale != 1.0),
    ("sliding_window", lambda c, _: c.sliding_window_size > -1 or c.window_kv_offsets is not None),
    ("logit_cap", lambda c, _: c.logit_cap != 0.0),
    ("sinks", lambda c, _: c.sinks is not None),
    ("xai_temperature", lambda c, _: c.xai_temperature_len > 0),
    ("not_causal", lambda c, _: c.custom_mask is None and not c.causal),
)
"""Asked at every verify call; only shapes and host values are looked at, nothing on the device."""


def backend_decline(facts: BackendFacts) -> str | None:
    """The reason why this backend is not ours, or None."""
    return next((reason for reason, holds in BACKEND_DECLINES if holds(facts)), None)


def call_decline(call: SlotCall, limits: Limits) -> str | None:
    """The reason why this call is not ours, or None."""
    return next((reason for reason, holds in CALL_DECLINES if holds(call, limits)), None)


def _is_mla(call: SlotCall) -> bool:
    return (
        call.q.shape[2] == D_QK
        and call.k.shape[1:] == (1, D_QK)
        and call.v.shape[1:] == (1, D_V)
        and call.o.shape[2] == D_V
        and call.k_buffer.shape[1:] == (1, D_QK)
    )


def _is_bf16(tensor: object) -> bool:
    # By name, so that this table needs no torch.
    return str(getattr(tensor, "dtype", "")) == "torch.bfloat16"
