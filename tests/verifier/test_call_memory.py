"""A Binder remembers the form of its last call: it must save time, and never let a changed call pass."""

from __future__ import annotations

import sys
import timeit
from dataclasses import fields

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tests.strategies import batches
from tests.verifier.calls import (
    ARRAYS,
    INPUTS,
    LIMITS,
    as_torch,
    call_of,
    make_call,
    make_call_in,
    torch_call,
)
from verify_numba import VerifyInputError, binding
from verify_numba.arrays import same_metadata
from verify_numba.binding import Binder
from verify_numba.validate import check_call

torch = pytest.importorskip("torch")


@pytest.fixture(params=["compiled check", "public attributes"], autouse=True)
def predicate(request, monkeypatch):
    """Both ways to compare metadata: torch's own, and what stands in for it where a torch has none."""
    if request.param == "public attributes":
        monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", None)


@pytest.fixture
def checks(monkeypatch):
    """One entry for every call that went through all rules."""
    seen = []

    def counted(*args, **limits):
        seen.append(args)
        return check_call(*args, **limits)

    monkeypatch.setattr(binding, "check_call", counted)
    return seen


def copied(call):
    return call.put(**{name: call.get(name).clone() for name in ARRAYS if call.get(name) is not None})


@pytest.mark.parametrize("layout", ["FULL_MASK", "CHAIN"])
@pytest.mark.parametrize("with_lse", [True, False])
def test_other_tensors_of_the_same_form_are_not_checked_anew(checks, layout, with_lse):
    call = torch_call(make_call(mask_layout=layout))
    if not with_lse:
        call = call.put(lse=None)
    binder = Binder(**LIMITS)
    twin = copied(call)
    first, again, other = call.bind(binder), call.bind(binder), twin.bind(binder)
    assert len(checks) == 1
    assert first == again
    places = tuple(0 if twin.get(name) is None else twin.get(name).data_ptr() for name in ARRAYS)
    assert other == (first[0], places, first[2])
    assert other[1][0] != first[1][0]


@settings(max_examples=40, deadline=None)
@given(st.lists(batches(max_prefix=20), min_size=2, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4))
def test_a_used_binder_says_what_a_new_one_says(synthetic, with_lse):
    limits = {"max_bs": 4, "T": 12, "device": -1}
    used = {heads: Binder(H=heads, **limits) for heads in (1, 2, 5, 8)}
    for batch, lse in zip(synthetic, with_lse, strict=False):
        call = torch_call(call_of(batch))
        call = call if lse else call.put(lse=None)
        for _ in range(2):
            assert call.bind(used[batch.H]) == call.bind(Binder(H=batch.H, **limits))


IN_PLACE = {
    "other storage": ("q", lambda t: t.set_(torch.zeros(13 * 8 * 576, dtype=t.dtype)), "shape"),
    "other dtype": ("k", lambda t: setattr(t, "data", t.to(torch.float16)), "float16"),
    "fewer rows": ("k", lambda t: t.resize_(12, 1, 576), "shape"),
    "other strides": ("kv_indices", lambda t: t.as_strided_((20,), (2,)), "byte stride"),
    "half the heads": ("q", lambda t: setattr(t, "data", t.data[:, :4]), "shape"),
    "a column per token": ("out", lambda t: setattr(t, "data", t.data.swapaxes(0, 1).contiguous().swapaxes(0, 1)),
                           "contiguous"),
    "shorter indptr": ("kv_indptr", lambda t: t.resize_(2), "length 2"),
    "freed": ("kv_pool", lambda t: t.untyped_storage().resize_(0), "without memory"),
    "freed indices": ("kv_indices", lambda t: t.untyped_storage().resize_(0), "without memory"),
    "freed mask": ("custom_mask", lambda t: t.untyped_storage().resize_(0), "without memory"),
    "freed results": ("lse", lambda t: t.untyped_storage().resize_(0), "without memory"),
}  # fmt: skip


@pytest.mark.parametrize("change", IN_PLACE)
def test_a_tensor_that_changed_in_place_is_checked_anew(change):
    field, alter, words = IN_PLACE[change]
    call, binder = copied(torch_call(make_call())), Binder(**LIMITS)
    call.bind(binder)
    alter(call.get(field))
    with pytest.raises(VerifyInputError, match=words) as caught:
        call.bind(binder)
    assert caught.value.field == field


def test_a_tensor_that_moved_onto_another_is_caught():
    call, binder = copied(torch_call(make_call())), Binder(**LIMITS)
    call.bind(binder)
    call.out.data = call.batch.q.view(-1)[: call.out.numel()].view(call.out.shape)
    with pytest.raises(VerifyInputError, match="out is overlapping q"):
        call.bind(binder)


@pytest.mark.parametrize("field", ["q", "k", "kv_pool"])
def test_a_tensor_that_moved_off_its_alignment_is_caught(field):
    """By half of what the kernels load at once: the allocator gives multiples of 64 bytes."""
    call, binder = copied(torch_call(make_call())), Binder(**LIMITS)
    call.bind(binder)
    tensor = call.get(field)
    room = torch.zeros(tensor.numel() + 8, dtype=torch.bfloat16)
    tensor.data = room[4:-4].view(tensor.shape)
    assert tensor.data_ptr() % 16 == 8
    with pytest.raises(VerifyInputError, match=f"^{field} is at address .* multiples of 16 bytes"):
        call.bind(binder)


@pytest.mark.parametrize("change", [{"sm_scale": -1.0}, {"mask_layout": "FULL_MASK"}, {"custom_mask": None}], ids=str)
def test_settings_are_looked_at_in_every_call(change):
    call, binder = torch_call(make_call()), Binder(**LIMITS)
    call.bind(binder)
    with pytest.raises(VerifyInputError) as caught:
        call.put(**change).bind(binder)
    assert caught.value.field == next(iter(change))


def test_a_refused_call_leaves_no_trace(checks):
    call, binder = torch_call(make_call()), Binder(**LIMITS)
    first = call.bind(binder)
    with pytest.raises(VerifyInputError):
        call.put(q=call.batch.q.to(torch.float16)).bind(binder)
    assert call.bind(binder) == first
    assert len(checks) == 2


def test_numpy_arrays_are_checked_every_time(checks):
    call, binder = make_call(), Binder(**LIMITS)
    assert call.bind(binder) == call.bind(binder)
    assert len(checks) == 2


def test_the_same_tensor_twice_is_taken():
    """One indptr in two places is no error: a batch in which all requests have as long a prefix as a draft."""
    call = torch_call(make_call(prefix=(9, 4), drafts=(9, 4)))
    call = call.put(kv_indptr=call.batch.qo_indptr)
    binder = Binder(**LIMITS)
    assert call.bind(binder) == call.bind(binder)


SAME = torch.zeros(3, 4, dtype=torch.bfloat16)
DIFFERENT = {
    "dtype": lambda: torch.zeros(3, 4, dtype=torch.float16),
    "shape": lambda: torch.zeros(4, 3, dtype=torch.bfloat16),
    "one more row": lambda: torch.zeros(4, 4, dtype=torch.bfloat16),
    "rank": lambda: torch.zeros(12, dtype=torch.bfloat16),
    "strides": lambda: torch.zeros(4, 3, dtype=torch.bfloat16).T,
    "padded": lambda: torch.zeros(3, 8, dtype=torch.bfloat16)[:, :4],
    "device": lambda: torch.zeros(3, 4, dtype=torch.bfloat16, device="meta"),
    "layout": lambda: torch.zeros(3, 4, dtype=torch.bfloat16).to_sparse(),
    "rows": lambda: torch.zeros(3, 4, dtype=torch.bfloat16).to_sparse_csr(),
    "class": lambda: torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16)),
    "NumPy": lambda: np.zeros((3, 4), np.uint16),
    "nothing": lambda: None,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("what", DIFFERENT)
def test_metadata_differ(what):
    other = DIFFERENT[what]()
    one = torch.zeros(2)
    assert not same_metadata((SAME, one))(other, torch.ones(2))
    assert not same_metadata((one, SAME))(torch.ones(2), other)


def test_metadata_agree_where_contents_and_places_differ():
    same = same_metadata((SAME, torch.zeros(2)))
    assert same(torch.ones(3, 4, dtype=torch.bfloat16), torch.ones(2))
    assert same(torch.ones(30, 4, dtype=torch.bfloat16)[10:13], torch.ones(20)[5:7])


@pytest.mark.parametrize("field", ARRAYS)
def test_a_tensor_on_another_kind_of_device_is_refused(field):
    call = torch_call(make_call())
    call = call.put(**{field: call.get(field).to("meta")})
    with pytest.raises(VerifyInputError, match=f"{field} is on meta, expected on the CPU or a CUDA device"):
        call.bind()


@pytest.mark.parametrize("field", INPUTS)
def test_a_sparse_tensor_is_refused(field):
    call = torch_call(make_call())
    call = call.put(**{field: call.get(field).to_sparse()})
    with pytest.raises(VerifyInputError, match=f"{field} is a tensor of layout torch.sparse_coo"):
        call.bind()


@pytest.mark.parametrize("field", [f.name for f in fields(type(make_call().batch)) if f.name in INPUTS])
def test_host_arrays_are_refused_by_a_verifier_on_a_gpu(field, monkeypatch):
    """With all other arrays on the GPU, as far as the rules can tell."""
    from verify_numba import arrays, validate

    def on_gpu(name, array):
        seen = arrays.view(name, array)
        return seen if name == field else seen._replace(device=0)

    monkeypatch.setattr(validate, "view", on_gpu)
    with pytest.raises(VerifyInputError, match=f"{field} is on the host, expected on cuda:0"):
        make_call().bind(Binder(**LIMITS | {"device": 0}))
    monkeypatch.setattr(validate, "view", lambda name, array: on_gpu(name, array)._replace(device=1))
    with pytest.raises(VerifyInputError, match="q is on cuda:1, expected on cuda:0"):
        make_call().bind(Binder(**LIMITS | {"device": 0}))


def test_a_repeated_form_costs_little(capsys, request):
    call = torch_call(make_call())
    used, count = Binder(**LIMITS), 500

    def best(run):
        return min(timeit.repeat(run, number=count, repeat=8)) / count * 1e6

    quick = best(lambda: used.bind(call.batch, call.out, call.lse))
    thorough = best(lambda: check_call(call.batch, call.out, call.lse, **LIMITS))
    with capsys.disabled():
        print(f"\n{request.node.callspec.id}: {quick:.1f} us a call of a known form, {thorough:.1f} us by all rules")
    assert quick < thorough / 2


def test_no_tensor_is_kept_alive():
    import gc
    import weakref

    binder = Binder(**LIMITS)
    call = copied(torch_call(make_call()))
    call.bind(binder)
    dead = [weakref.ref(call.get(name)) for name in ARRAYS]
    del call
    gc.collect()
    assert not any(ref() is not None for ref in dead)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_view_of_a_view_keeps_its_place(kind):
    call = make_call_in(kind)
    wide = np.zeros((13, 3, 1, 576), call.batch.q.dtype if kind == "numpy" else np.uint16)
    wide = wide.view(make_call().batch.q.dtype)
    layer = wide[:, 1]
    bound = call.put(k=as_torch(layer) if kind == "torch" else layer).bind()
    assert bound[1][1] == wide.ctypes.data + 1152
    assert bound[0].k_stride == 3 * 1152
