"""The budgets let every honest bf16 kernel through and nothing that is wrong."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from captured_tensors import load_manifest, scatter_pool
from tests.cases import SHAPES, make_batch
from tests.strategies import batches

KERNELS = [(1, 0.0), (1, 0.99), (3, 5.55), (4, 0.3), (70, 0.0)]


def measured(batch, out, lse, parts="ALL"):
    return oracle.error_budget(batch, parts).use(out, lse, oracle.verify_batch(batch, parts))


@pytest.mark.parametrize("logit_std", [0.01, 2.0, 314.0, 1e4])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.id)
def test_ideal_kernels_pass(shape, logit_std):
    batch = shape.make(2, tree="shuffled", blind=0.1, logit_std=logit_std)
    exact, budget = oracle.verify_batch(batch), oracle.error_budget(batch)
    for nsplit, headroom in KERNELS:
        out, lse = oracle.bf16_verify_batch(batch, nsplit=nsplit, headroom=headroom)
        assert budget.use(out, lse, exact).ok, (nsplit, headroom)


@given(
    batch=batches(),
    nsplit=st.integers(1, 9),
    headroom=st.floats(0, 8),
    parts=st.sampled_from(["ALL", "PREFIX", "TAIL"]),
)
@settings(max_examples=40, deadline=None)
def test_any_ideal_kernel_passes(batch, nsplit, headroom, parts):
    out, lse = oracle.bf16_verify_batch(batch, parts, nsplit=nsplit, headroom=headroom)
    assert measured(batch, out, lse, parts).ok


def cancelling(batch):
    """Values that cancel in pairs: out is far smaller than what is summed."""
    pool = np.array(batch.kv_pool)
    slots = batch.kv_indices[: batch.kv_indptr[-1]]
    pool[slots[1::2]] = -pool[slots[0::2]]
    pool[slots, :, 512:] = 0
    return replace(batch, kv_pool=pool, q=(batch.q.astype(np.float32) * 1e-4).astype(batch.q.dtype))


def repeated(batch):
    """One key over and over: equal weights, which round alike."""
    pool = np.array(batch.kv_pool)
    slots = batch.kv_indices[: batch.kv_indptr[-1]]
    pool[slots[: len(slots) // 2]] = pool[slots[0]]
    return replace(batch, kv_pool=pool)


@pytest.mark.parametrize("twist", [cancelling, repeated])
def test_ideal_kernels_pass_on_hard_values(twist):
    batch = twist(make_batch(3, prefix=(200,), drafts=(6,), tree="tree"))
    exact, budget = oracle.verify_batch(batch), oracle.error_budget(batch)
    for nsplit, headroom in KERNELS:
        out, lse = oracle.bf16_verify_batch(batch, nsplit=nsplit, headroom=headroom)
        assert budget.use(out, lse, exact).ok, (nsplit, headroom)


def test_the_budget_is_a_small_multiple_of_the_ideal_error():
    """Neither measure of out allows more than five times what the reference itself shows in its worst row."""
    for shape in SHAPES:
        batch = shape.make(4)
        exact, budget = oracle.verify_batch(batch), oracle.error_budget(batch)
        uses = [budget.use(*oracle.bf16_verify_batch(batch, nsplit=n, headroom=r), exact) for n, r in KERNELS]
        if batch.N:
            assert max(use.out_abs for use in uses) > 0.2
            assert max(use.out_norm for use in uses) > 0.2
            assert budget.out_rel < 0.008


def fault_lost_key(batch):
    """The last prefix key of every request is missing."""
    return oracle.bf16_verify_batch(replace(batch, **_shorter(batch)))


def _shorter(batch):
    lengths = [length - 1 for length in batch.prefix_lengths]
    starts, kept = np.concatenate([[0], np.cumsum(lengths)]), []
    for b, length in enumerate(lengths):
        kept.append(batch.kv_indices[batch.kv_indptr[b] : batch.kv_indptr[b] + length])
    masks = [oracle.tree_mask(batch, b).ravel() for b in range(batch.bs)]
    cells = np.concatenate([[0], np.cumsum([m.size for m in masks])])
    return {
        "kv_indptr": starts,
        "kv_indices": np.concatenate(kept),
        "custom_mask": np.concatenate(masks),
        "mask_indptr": cells,
        "mask_layout": "QLEN_ONLY",
    }


def fault_mask_shifted(batch):
    """The mask is read one cell too far."""
    return oracle.bf16_verify_batch(replace(batch, custom_mask=np.roll(batch.custom_mask, -1)))


def fault_base_two(batch):
    """The lse leaves in base 2."""
    out, lse = oracle.bf16_verify_batch(batch)
    return out, lse / np.log(2)


def fault_merge_in_base_two(batch):
    """Base-2 lses of the two parts are merged as natural ones."""
    parts = [oracle.bf16_verify_batch(batch, part) for part in ("PREFIX", "TAIL")]
    return oracle.merge([(out, lse / np.log(2)) for out, lse in parts])[0], None


def fault_heads_swapped(batch):
    out, lse = oracle.bf16_verify_batch(batch)
    order = [1, 0, *range(2, batch.H)]
    return out[:, order], lse[:, order]


def fault_scores_in_bf16(batch):
    """Queries are scaled and rounded to bf16 again before the scores."""
    scaled = (batch.q.astype(np.float32) * np.float32(batch.sm_scale)).astype(ml_dtypes.bfloat16)
    return oracle.bf16_verify_batch(replace(batch, q=scaled, sm_scale=1.0))


def fault_fp16_bits(batch):
    """bf16 bits taken for fp16."""
    out, lse = oracle.bf16_verify_batch(batch)
    return out.astype(ml_dtypes.bfloat16).view(np.float16), lse


def fault_one_column(batch):
    """A single element is off by three bf16 ulp of the largest in its row."""
    out, lse = oracle.bf16_verify_batch(batch)
    out[3, 2, 77] += 6 * oracle.half_ulp(np.abs(out[3, 2]).max())
    return out, lse


def fault_one_nan(batch):
    out, lse = oracle.bf16_verify_batch(batch)
    out[0, 0, 5] = np.nan
    return out, lse


FAULTS = [
    fault_lost_key,
    fault_mask_shifted,
    fault_base_two,
    fault_merge_in_base_two,
    fault_heads_swapped,
    fault_scores_in_bf16,
    fault_fp16_bits,
    fault_one_column,
    fault_one_nan,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__.removeprefix("fault_"))
@pytest.mark.parametrize("logit_std", [0.5, 2.0])
def test_faults_exceed_the_budget(fault, logit_std):
    batch = make_batch(5, prefix=(60, 200), drafts=(9, 7), tree="tree", logit_std=logit_std)
    assert measured(batch, *oracle.bf16_verify_batch(batch)).ok
    with np.errstate(all="ignore"):
        out, lse = fault(batch)
    assert measured(batch, out, lse).worst > 1


def test_swapped_tokens_on_real_input_exceed_the_budget():
    case = load_manifest()[0]
    batch, exact = captured(case)
    out = case.out_triton.reshape(case.N, case.H, 512)
    assert oracle.error_budget(batch).use(out[::-1], None, exact).worst > 1


def captured(case):
    pool = scatter_pool(case)
    batch = oracle.Batch(
        case.q,
        case.k,
        pool.kv_pool,
        case.qo_indptr,
        case.kv_indptr,
        pool.kv_indices,
        case.custom_mask,
        case.mask_indptr,
        case.meta.sm_scale,
        case.meta.mask_layout,
    )
    return batch, oracle.verify_batch(batch)


@pytest.mark.parametrize("case", load_manifest(), ids=lambda c: c.name)
def test_captured_triton_output_is_within_budget(case):
    """Real kernel, real input; the oracle and the capture agree."""
    batch, exact = captured(case)
    use = oracle.error_budget(batch).use(case.out_triton.reshape(case.N, case.H, 512), None, exact)
    assert use.ok
    assert use.out_abs > 0.1


def test_what_is_not_finite_must_not_be_finite():
    batch = make_batch(6, prefix=(5,), drafts=(3,), tree="chain")
    k = np.array(batch.k)
    k[2] = np.nan
    batch = replace(batch, k=k)
    exact, budget = oracle.verify_batch(batch), oracle.error_budget(batch)
    out, lse = oracle.bf16_verify_batch(batch)
    assert budget.use(out, lse, exact).ok
    out[2] = 0
    assert budget.use(out, lse, exact).out_abs == np.inf


def test_empty_rows_have_no_slack():
    batch = make_batch(7, prefix=(0,), drafts=(3,), blind=1.0)
    exact, budget = oracle.verify_batch(batch), oracle.error_budget(batch)
    out, lse = np.zeros((3, 8, 512)), np.full((3, 8), -np.inf)
    assert budget.use(out, lse, exact).ok
    assert budget.use(out + 1e-30, lse, exact).out_abs == np.inf
    assert budget.use(out, np.full((3, 8), -1e30), exact).lse_abs == np.inf


@pytest.mark.parametrize(
    ("value", "want"), [(1.0, 2**-8), (1.99, 2**-8), (2.0, 2**-7), (-0.75, 2**-9), (0, 2**-134)]
)
def test_half_ulp(value, want):
    assert oracle.half_ulp(np.array(value)) == want


def test_round_bf16_ties_to_even():
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1.0, -(1 + 2**-8 + 2**-12)])
    np.testing.assert_array_equal(oracle.round_bf16(values), [1, 1 + 2**-6, 1, -(1 + 2**-7)])
