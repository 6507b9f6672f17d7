"""`Verifier` on a GPU: streams, devices, memory, and results that do not depend on what lies around them."""

from __future__ import annotations

import time

import numpy as np
import pytest

from oracle import verify_batch
from tests.cases import BF16
from tests.verifier.calls import ARRAYS, as_torch, bits, make_call, torch_call
from verify_numba import Parts, Verifier, VerifyInputError
from verify_numba.dims import D_QK

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="the GPU tests hold their buffers in torch tensors")

RAGGED = {"prefix": (700, 65, 0), "drafts": (9, 9, 4)}
SLEEP = 400_000_000
"""Cycles; a fifth of a second or more."""


@pytest.fixture(scope="module")
def verifier():
    made = Verifier(max_bs=4, T=9, H=8, device="cuda:0")
    made.warmup()
    return made


@pytest.fixture
def call():
    return torch_call(make_call(**RAGGED), "cuda:0")


def run(verifier, call, **options):
    """The bits of the results, over poison."""
    call.out.fill_(float("nan"))
    if call.lse is not None:
        call.lse.fill_(float("nan"))
    verifier.verify(call.batch, call.out, call.lse, **options)
    torch.cuda.synchronize(call.out.device)
    return bits(call.out), None if call.lse is None else bits(call.lse)


def same(one, other):
    return all(np.array_equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("parts", Parts)
def test_results_are_near_the_oracle(verifier, call, parts):
    out, lse = run(verifier, call, parts=parts)
    exact_out, exact_lse = verify_batch(make_call(**RAGGED).batch, parts)
    np.testing.assert_allclose(out.view(BF16).astype(np.float64), exact_out, atol=0.03)
    np.testing.assert_allclose(lse.view(np.float32), exact_lse, atol=1e-3)


def test_twenty_runs_agree_in_every_bit(verifier, call):
    first = run(verifier, call)
    for _ in range(19):
        verifier.poison_workspace()
        assert same(run(verifier, call), first)


def test_a_second_verifier_agrees_in_every_bit(verifier, call):
    assert same(run(Verifier(max_bs=4, T=9, H=8, device="cuda"), call), run(verifier, call))


@pytest.mark.parametrize("nsplit", [1, 3, 64])
def test_more_workers_than_keys_read_nothing_stale(nsplit):
    call = torch_call(make_call(prefix=(5, 0), drafts=(3, 1)), "cuda:0")
    verifier = Verifier(max_bs=2, T=3, H=8, device="cuda:0", nsplit=nsplit)
    clean = run(verifier, call)
    verifier.poison_workspace()
    assert same(run(verifier, call), clean)
    exact, _ = verify_batch(make_call(prefix=(5, 0), drafts=(3, 1)).batch)
    np.testing.assert_allclose(clean[0].view(BF16).astype(np.float64), exact, atol=0.03)


def test_lse_may_be_left_out(verifier, call):
    whole = run(verifier, call)
    assert np.array_equal(run(verifier, call.put(lse=None))[0], whole[0])


def test_strided_inputs_change_no_bit(verifier, call):
    expected = run(verifier, call)
    N = call.batch.q.shape[0]
    nan = {"fill_value": float("nan"), "dtype": torch.bfloat16, "device": "cuda:0"}
    heads_first = torch.full((8, N, D_QK), **nan).transpose(0, 1)
    padded = torch.full((N, 9, D_QK + 64), **nan)[:, :8, :D_QK]
    layers = torch.full((call.batch.kv_pool.shape[0], 3, 1, D_QK), **nan)[:, 1]
    drafts = torch.full((N, 1, D_QK + 8), **nan)[..., :D_QK]
    layers.copy_(call.batch.kv_pool)
    drafts.copy_(call.batch.k)
    for q in (heads_first, padded):
        q.copy_(call.batch.q)
        assert same(run(verifier, call.put(q=q, kv_pool=layers, k=drafts)), expected)


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("indptr_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("mask_dtype", [np.bool_, np.uint8])
def test_index_widths_change_no_bit(verifier, call, index_dtype, indptr_dtype, mask_dtype):
    other = make_call(**RAGGED, index_dtype=index_dtype, indptr_dtype=indptr_dtype, mask_dtype=mask_dtype)
    assert same(run(verifier, torch_call(other, "cuda:0")), run(verifier, call))


def test_one_visible_key_passes_through_unchanged():
    host = make_call(prefix=(1,), drafts=(1,), H=1, blind=1.0)
    row = np.zeros(D_QK, BF16)
    row[:512] = np.linspace(-60_000, 3e38, 512)
    row[:4] = 1.0, -2.5, 1e-30, 65536.0
    host.batch.kv_pool[host.batch.kv_indices[0], 0] = row
    host.batch.q[...] = 0
    out, _ = run(Verifier(max_bs=1, T=1, H=1, device="cuda:0"), torch_call(host, "cuda:0"))
    np.testing.assert_array_equal(out[0, 0], bits(row[:512]))


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_slots_beyond_two_to_the_31_elements(verifier, index_dtype):
    """Slot 3,728,270 begins at element 2^31 of the pool, and past byte 2^32."""
    first = 2**31 // D_QK + 1
    small = torch_call(make_call(**RAGGED, index_dtype=index_dtype), "cuda:0")
    slots = small.batch.kv_pool.shape[0]
    if torch.cuda.mem_get_info()[0] < (first + slots) * 2 * D_QK + 2**30:
        pytest.skip("the pool of this test needs 5.3 GB of free GPU memory")
    pool = torch.full((first + slots, 1, D_QK), float("nan"), dtype=torch.bfloat16, device="cuda:0")
    pool[first:] = small.batch.kv_pool
    far = small.put(kv_pool=pool, kv_indices=small.batch.kv_indices + first)
    assert far.batch.kv_indices.dtype == small.batch.kv_indices.dtype
    assert same(run(verifier, far), run(verifier, small))


def test_the_current_stream_is_used(verifier, call):
    """The queries arrive late, on a side stream: a launch on any other stream would see NaN."""
    expected, q = run(verifier, call), call.batch.q.clone()
    for tensor in (call.batch.q, call.out, call.lse):
        tensor.fill_(float("nan"))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP)
        call.batch.q.copy_(q)
        verifier.verify(call.batch, call.out, call.lse)
    side.synchronize()
    assert same((bits(call.out), bits(call.lse)), expected)


def test_the_host_never_waits_and_nothing_is_allocated(verifier, call):
    run(verifier, call)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda._sleep(SLEEP)
    for _ in range(5):
        verifier.verify(call.batch, call.out, call.lse)
    done = torch.cuda.Event()
    done.record()
    assert not done.query()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()


@pytest.mark.parametrize("field", ARRAYS)
def test_a_host_tensor_is_refused(verifier, call, field):
    run(verifier, call)
    mixed = call.put(**{field: call.get(field).cpu()})
    with pytest.raises(VerifyInputError, match=f"^{field} is on the host, expected on cuda:0$"):
        verifier.verify(mixed.batch, mixed.out, mixed.lse)


def test_numpy_arrays_are_refused(verifier):
    host = make_call(**RAGGED)
    with pytest.raises(VerifyInputError, match="^q is on the host, expected on cuda:0$"):
        verifier.verify(host.batch, host.out, host.lse)


def test_two_gpus(verifier, call):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    expected = run(verifier, call)
    there = torch_call(make_call(**RAGGED), "cuda:1")
    for field in ARRAYS:
        mixed = call.put(**{field: there.get(field)})
        with pytest.raises(VerifyInputError, match=f"^{field} is on cuda:1, expected on cuda:0$"):
            verifier.verify(mixed.batch, mixed.out, mixed.lse)
    second = Verifier(max_bs=4, T=9, H=8, device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert same(run(second, there), expected)
    assert torch.cuda.current_device() == 0


def test_a_gpu_that_is_not_there_is_said_so():
    from verify_numba.gpu.driver import CudaUnavailable

    count = torch.cuda.device_count()
    with pytest.raises(CudaUnavailable, match=f"there is no GPU {count}"):
        Verifier(max_bs=1, T=1, H=1, device=f"cuda:{count}")


def test_without_draft_tokens_nothing_is_launched(verifier, monkeypatch):
    monkeypatch.setattr(verifier._executor, "_launch", lambda *_: pytest.fail("launched"))
    for shape in ({"prefix": (), "drafts": ()}, {"prefix": (4, 2), "drafts": (0, 0)}):
        empty = torch_call(make_call(**shape), "cuda:0")
        verifier.verify(empty.batch, empty.out, empty.lse)


def test_requires_grad_is_no_obstacle(verifier, call):
    expected = run(verifier, call)
    call.batch.q.requires_grad_(True)
    assert same(run(verifier, call), expected)


def test_what_a_call_costs_the_host(verifier, call, capsys):
    """Printed, not judged: machines differ. Fewer calls than a launch queue holds, so that none waits for the GPU."""
    best, count = float("inf"), 100
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            verifier.verify(call.batch, call.out)
        best = min(best, (time.perf_counter() - start) / count)
    torch.cuda.synchronize()
    with capsys.disabled():
        print(f"\nhost cost of a verify call: {1e6 * best:.1f} us")
    assert torch.isfinite(call.out).all()


def test_tensors_keep_bf16_on_the_way():
    assert as_torch(np.ones(1, BF16), "cuda:0").item() == 1.0
