"""`Verifier` on the CPU: NumPy arrays and torch tensors alike; what it takes, refuses and leaves alone."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from oracle import verify_batch
from tests.cases import BF16, make_batch
from tests.verifier.calls import ARRAYS, as_torch, bits, call_of, make_call, torch_call, verify_batch_of
from verify_numba import MaskLayout, Parts, Verifier, VerifyInputError
from verify_numba.gpu.driver import CudaUnavailable, get_driver

SMALL = {"prefix": (20, 3), "drafts": (3, 2), "H": 2}


@pytest.fixture(scope="module")
def verifier():
    return Verifier(max_bs=2, T=3, H=2, device="cpu")


def run(verifier, call, **options):
    verifier.verify(call.batch, call.out, call.lse, **options)
    return bits(call.out), None if call.lse is None else bits(call.lse)


def same(one, other):
    return all(np.array_equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def reference(verifier):
    """The results of the small batch in NumPy arrays, near the oracle's."""
    call = make_call(**SMALL)
    result = run(verifier, call)
    out, lse = verify_batch(call.batch)
    np.testing.assert_allclose(call.out.astype(np.float64), out, atol=0.03)
    np.testing.assert_allclose(call.lse, lse, atol=1e-4)
    return result


@pytest.mark.parametrize(
    "options",
    [
        {"q_layout": "heads-first"},
        {"q_layout": "padded"},
        {"index_dtype": np.int32, "indptr_dtype": np.int64, "mask_dtype": np.uint8},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_strides_and_widths_change_no_bit(verifier, reference, options, kind):
    call = make_call(**SMALL, **options)
    assert same(run(verifier, torch_call(call) if kind == "torch" else call), reference)


def test_tensors_give_the_same_bits_as_arrays(verifier, reference):
    call = torch_call(make_call(**SMALL))
    assert same(run(verifier, call), reference)
    call.batch.q.requires_grad_(True)
    call.batch.k.requires_grad_(True)
    again = call.put(out=call.out.clone().fill_(float("nan")), lse=call.lse.clone())
    assert same(run(verifier, again), reference)


def test_rows_of_a_layered_cache_give_the_same_bits(verifier, reference):
    call = make_call(**SMALL)
    layers = np.full((len(call.batch.kv_pool), 3, 1, 576), np.nan, BF16)
    layers[:, 1] = call.batch.kv_pool
    drafts = np.full((5, 1, 576 + 8), np.nan, BF16)
    drafts[..., :576] = call.batch.k
    assert same(run(verifier, call.put(kv_pool=layers[:, 1], k=drafts[..., :576])), reference)


def test_results_may_lack_lse_or_have_joined_heads(verifier, reference):
    call = make_call(**SMALL).put(lse=None)
    assert np.array_equal(run(verifier, call)[0], reference[0])
    joined = make_call(**SMALL)
    joined = joined.put(out=joined.out.reshape(5, -1))
    out, lse = run(verifier, joined)
    assert same((out.reshape(reference[0].shape), lse), reference)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_bf16_values_pass_through_unchanged(kind):
    """One visible key has weight one: the output is its value, bit for bit, so 1.0 stays 1.0 and nothing is fp16."""
    call = make_call(prefix=(1,), drafts=(1,), H=1, blind=1.0)
    row = np.zeros(576, BF16)
    row[:512] = np.linspace(-60_000, 3e38, 512)
    row[:4] = 1.0, -2.5, 1e-30, 65536.0
    call.batch.kv_pool[call.batch.kv_indices[0], 0] = row
    call.batch.q[...] = 0
    out, _ = run(Verifier(max_bs=1, T=1, H=1, device="cpu"), torch_call(call) if kind == "torch" else call)
    np.testing.assert_array_equal(out[0, 0], bits(row[:512]))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_half_precision_is_refused_by_name_and_nothing_is_written(verifier, kind):
    call = make_call(**SMALL)
    call = call.put(q=call.batch.q.astype(np.float16))
    call = torch_call(call) if kind == "torch" else call
    with pytest.raises(VerifyInputError, match="^q is float16, expected bfloat16$"):
        verifier.verify(call.batch, call.out, call.lse)
    assert (bits(call.out) == bits(make_call(**SMALL).out)).all()


def test_a_scratch_full_of_nan_changes_no_bit(verifier, reference):
    verifier.poison_workspace()
    executor = verifier._executor
    assert np.isnan(executor._part_o).all()
    assert np.isnan(executor._part_lse).all()
    assert same(run(verifier, make_call(**SMALL)), reference)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("shape", [{"prefix": (), "drafts": ()}, {"prefix": (4, 2), "drafts": (0, 0)}], ids=str)
def test_without_draft_tokens_nothing_runs(verifier, monkeypatch, shape, kind):
    def run(*_):
        raise AssertionError("launched")

    monkeypatch.setattr(verifier._executor, "run", run)
    call = make_call(**shape, H=2)
    call = torch_call(call) if kind == "torch" else call
    verifier.verify(call.batch, call.out, call.lse)
    bad = call.put(sm_scale=0.0)
    with pytest.raises(VerifyInputError, match="sm_scale"):
        verifier.verify(bad.batch, bad.out, bad.lse)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_without_a_prefix_empty_tensors_will_do(verifier, kind):
    call = make_call(prefix=(0, 0), drafts=(3, 2), H=2)
    call = call.put(kv_indices=call.batch.kv_indices[:0], kv_pool=call.batch.kv_pool[:0])
    call = torch_call(call) if kind == "torch" else call
    verifier.verify(call.batch, call.out, call.lse)
    out, lse = verify_batch(make_call(prefix=(0, 0), drafts=(3, 2), H=2).batch)
    np.testing.assert_allclose(bits(call.out).view(BF16).astype(np.float64), out, atol=0.03)


def test_parts_are_parts_and_merge_to_the_whole(verifier):
    call = make_call(**SMALL)
    for parts in Parts:
        run(verifier, call, parts=parts)
        out, lse = verify_batch(call.batch, parts)
        np.testing.assert_allclose(call.out.astype(np.float64), out, atol=0.03)
        np.testing.assert_allclose(call.lse, lse, atol=1e-4)
    for wrong in ("ALL", 3, None):
        with pytest.raises(VerifyInputError, match=f"^parts is {wrong!r}, expected a Parts$"):
            verifier.verify(call.batch, call.out, call.lse, parts=wrong)


def test_more_than_it_was_made_for_is_refused(verifier):
    for shape, field in (({"prefix": (1,) * 3, "drafts": (1,) * 3, "H": 2}, "qo_indptr"),
                         ({"prefix": (1,), "drafts": (4,), "H": 2}, "q"),
                         ({"prefix": (1,), "drafts": (1,), "H": 4}, "q")):  # fmt: skip
        call = call_of(make_batch(**shape))
        with pytest.raises(VerifyInputError) as caught:
            verifier.verify(call.batch, call.out, call.lse)
        assert caught.value.field == field


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:0 ", "CPU", "", 0, None], ids=repr)
def test_an_unknown_device_is_named(device):
    with pytest.raises(VerifyInputError, match="expected 'auto', 'cpu' or 'cuda:N'") as caught:
        Verifier(max_bs=1, T=1, H=1, device=device)
    assert caught.value.field == "device"
    assert repr(device) in str(caught.value)


def test_a_torch_device_is_a_device():
    torch = pytest.importorskip("torch")
    Verifier(max_bs=1, T=1, H=1, device=torch.device("cpu")).warmup()


def test_auto_is_the_cpu_where_torch_has_no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    verifier = Verifier(max_bs=1, T=1, H=1)
    call = make_call(prefix=(2,), drafts=(1,), H=1)
    verifier.verify(call.batch, call.out)
    assert not np.isnan(call.out.astype(np.float32)).any()


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:99"])
def test_a_gpu_that_is_not_there_is_said_so(device):
    try:
        count = get_driver().device_count()
    except CudaUnavailable:
        count = 0
    if device != "cuda:99" and count:
        pytest.skip("there is a GPU 0 here")
    with pytest.raises(CudaUnavailable, match="no NVIDIA driver|sees|no GPU"):
        Verifier(max_bs=1, T=1, H=1, device=device)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_bs", 0), ("T", 65), ("H", 129), ("T", 2.0), ("nsplit", 0), ("form", "triple"),
        ("lanes_arrive", 1), ("lanes_arrive", None),
    ],
)
def test_sizes_are_refused_by_name(field, value):
    with pytest.raises(VerifyInputError) as caught:
        Verifier(**{"max_bs": 1, "T": 1, "H": 1, "device": "cpu", field: value})
    assert caught.value.field == field


def test_lanes_arrive_changes_nothing_but_the_name_here():
    call = make_call(**SMALL)
    sizes = {"max_bs": 2, "T": 3, "H": 2, "device": "cpu"}
    plain, lanes = Verifier(**sizes), Verifier(**sizes, lanes_arrive=True)
    assert lanes.plan.geometry.name == f"{plain.plan.geometry.name}_lanes_arrive"
    results = []
    for verifier in (plain, lanes):
        call.out[...], call.lse[...] = np.nan, np.nan
        verifier.poison_workspace()
        verifier.verify(call.batch, call.out, call.lse)
        assert np.isfinite(call.lse).all()
        results.append((call.out.copy().view(np.uint16), call.lse.copy().view(np.uint32)))
    for one, other in zip(*results, strict=True):
        assert np.array_equal(one, other)


def test_the_plan_can_be_read_and_printed(verifier):
    assert (verifier.plan.max_bs, verifier.plan.T, verifier.plan.H) == (2, 3, 2)
    assert "workers" in str(verifier.plan)
    with pytest.raises(AttributeError):
        verifier.plan.T = 5


def test_inputs_are_only_read(verifier):
    call = make_call(**SMALL)
    names = [name for name in ARRAYS if name not in ("out", "lse")]
    before = {name: call.get(name).tobytes() for name in names}
    for name in names:
        call.get(name).flags.writeable = False
    run(verifier, call)
    assert {name: call.get(name).tobytes() for name in names} == before


def test_a_chain_is_a_lower_triangle(verifier):
    chain = make_call(**SMALL, mask_layout="CHAIN")
    tree = verify_batch_of(make_batch(**SMALL, tree="chain", mask_layout="QLEN_ONLY"))
    assert tree.mask_layout is MaskLayout.QLEN_ONLY
    again = chain.put(
        custom_mask=tree.custom_mask, mask_indptr=tree.mask_indptr, mask_layout=tree.mask_layout,
        out=np.zeros_like(chain.out), lse=np.zeros_like(chain.lse),
    )  # fmt: skip
    assert same(run(verifier, chain), run(verifier, again))


def test_the_helper_keeps_strides():
    q = make_call(q_layout="heads-first").batch.q
    assert [2 * s for s in as_torch(q).stride()] == list(q.strides)
