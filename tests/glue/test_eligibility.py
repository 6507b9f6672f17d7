"""Each row of both tables: the call or backend that it is there for, and nothing else."""

import pytest
import torch

from sglang_glue.eligibility import (
    BACKEND_DECLINES,
    CALL_DECLINES,
    Limits,
    backend_decline,
    call_decline,
)
from tests.glue.fakes import make_call, make_facts

LIMITS = Limits(max_bs=8, T=4, H=2)
CALL = make_call()

BAD_CALLS = {
    "empty": {"qo_indptr": CALL.qo_indptr[:1], "q": CALL.q[:0]},
    "batch_size": {"qo_indptr": torch.arange(10)},
    "draft_tokens": {"max_extend_len": 5},
    "ragged": {"q": CALL.q[:-1]},
    "heads": {"q": CALL.q[:, :1]},
    "not_mla": {"q": CALL.q[..., :192]},
    "kv_dtype": {"k_buffer": CALL.k_buffer.to(torch.float8_e4m3fn)},
    "dtype": {"q": CALL.q.half()},
    "kv_scale": {"k_descale": 0.5},
    "sliding_window": {"sliding_window_size": 128},
    "logit_cap": {"logit_cap": 30.0},
    "sinks": {"sinks": torch.zeros(2)},
    "xai_temperature": {"xai_temperature_len": 1024},
    "not_causal": {"custom_mask": None, "causal": False},
}

BAD_BACKENDS = {
    "not_mla": {"use_mla": False},
    "kv_pool": {"layer_of": {}},
    "page_size": {"page_size": 64},
    "deterministic": {"deterministic": True},
    "dcp": {"dcp_size": 2},
    "draft_tokens": {"T": 65},
    "heads": {"H": 129},
}


@pytest.mark.parametrize("lengths", [(5, 9), (0,), (1,) * 8])
@pytest.mark.parametrize("tree", [True, False])
def test_an_mla_verify_call_is_ours(lengths, tree):
    assert call_decline(make_call(lengths, tree=tree), LIMITS) is None


def test_fewer_draft_tokens_than_the_budget_are_ours():
    assert call_decline(make_call(T=3), LIMITS) is None


@pytest.mark.parametrize("reason", BAD_CALLS)
def test_declined_call(reason):
    assert call_decline(CALL._replace(**BAD_CALLS[reason]), LIMITS) == reason


def test_every_call_rule_has_a_case():
    assert [reason for reason, _ in CALL_DECLINES] == list(BAD_CALLS)


def test_an_mla_target_backend_is_ours():
    assert backend_decline(make_facts(layer_of={1: 0})) is None


@pytest.mark.parametrize("reason", BAD_BACKENDS)
def test_declined_backend(reason):
    assert backend_decline(make_facts(**{"layer_of": {1: 0}, **BAD_BACKENDS[reason]})) == reason


def test_every_backend_rule_has_a_case():
    assert [reason for reason, _ in BACKEND_DECLINES] == list(BAD_BACKENDS)
