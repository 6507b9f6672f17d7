import math

import numpy as np
import pytest
import torch

from harness import bench_check
from harness.bench_check import judge, reference
from harness.bench_inputs import Coldness, Workload, make_pool
from harness.bench_shapes import BenchShape
from oracle import attention
from verify_numba.dims import D_V


@pytest.fixture
def work():
    pool = make_pool(4096, torch.device("cpu"), seed=3)
    return Workload(BenchShape((300, 0, 17), T=4, H=3), pool, Coldness(bytes=0, min_sets=2), seed=3)


def naive(work, index):
    """Whole softmax, one request and row at a time."""
    out, lse = [], []
    for b, slots in enumerate(work.sets[index]):
        keys = work.pool[slots, 0].double()
        for i in range(4):
            visible = torch.cat([torch.ones(slots.numel() - 4, dtype=torch.bool), work.tree[b, i]])
            scores = work.q[b * 4 + i].double() @ keys[visible].T * work.sm_scale
            out.append(torch.softmax(scores, -1) @ keys[visible, :D_V])
            lse.append(torch.logsumexp(scores, -1))
    return torch.stack(out), torch.stack(lse)


def ref_of(work, index=0):
    return reference(work.q, work.pool, work.sets[index], work.tree, work.sm_scale)


@pytest.mark.parametrize("chunk", [8192, 64, 7])
def test_reference_equals_a_naive_one(work, monkeypatch, chunk):
    monkeypatch.setattr(bench_check, "KEY_CHUNK", chunk)
    out, lse = naive(work, 1)
    ref = ref_of(work, 1)
    torch.testing.assert_close(ref.out, out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ref.lse, lse, rtol=1e-12, atol=1e-12)


def test_reference_equals_the_oracle(work):
    ref = ref_of(work)
    for b, slots in enumerate(work.sets[0]):
        rows = slice(4 * b, 4 * b + 4)
        q, k, prefix = (x.double().numpy() for x in (work.q[rows], work.k[rows], work.pool[slots[:-4]]))
        out, lse = attention(q, prefix, k, work.tree[b].numpy(), work.sm_scale)
        np.testing.assert_allclose(ref.out[rows].numpy(), out, rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(ref.lse[rows].numpy(), lse, rtol=1e-11)


def test_rounding_alone_is_green(work):
    ref = ref_of(work)
    assert judge(ref.out.bfloat16(), ref.lse.float(), ref).green
    assert judge(ref.rounded.bfloat16(), ref.lse.float(), ref).green


def test_limits_are_of_the_size_of_bf16_rounding(work):
    ref = ref_of(work)
    check = judge(ref.out, ref.lse, ref)
    assert 2.0**-10 < check.rel_norm_limit < 2.0**-6
    assert check.rel_norm_limit <= check.worst_row_limit


def test_a_key_that_was_not_read_is_red(work):
    short = [work.sets[0][0][1:], *work.sets[0][1:]]
    wrong = reference(work.q, work.pool, short, work.tree, work.sm_scale)
    assert not judge(wrong.out.bfloat16(), None, ref_of(work)).green


def test_a_causal_mask_in_place_of_the_tree_is_red(work):
    chain = torch.ones_like(work.tree).tril()
    assert not torch.equal(chain, work.tree)
    wrong = reference(work.q, work.pool, work.sets[0], chain, work.sm_scale)
    assert not judge(wrong.out.bfloat16(), None, ref_of(work)).green


def test_lse_in_base_2_is_red(work):
    ref = ref_of(work)
    check = judge(ref.out.bfloat16(), ref.lse / math.log(2), ref)
    assert not check.green and check.rel_norm <= check.rel_norm_limit


def test_one_nan_is_red_and_named(work):
    ref = ref_of(work)
    out = ref.out.bfloat16()
    out[5, 2, 100] = torch.nan
    check = judge(out, None, ref)
    assert not check.green
    assert check.where == "token 5, head 2"
    assert check.as_json()["rel_norm"] == "nan"


def test_peers_get_a_wider_limit_that_still_sees_a_wrong_set(work):
    ref = ref_of(work)
    noisy = ref.out * (1 + 1e-2)
    assert judge(noisy, None, ref, peer=True).green and not judge(noisy, None, ref).green
    assert not judge(ref_of(work, 1).out, None, ref, peer=True).green
