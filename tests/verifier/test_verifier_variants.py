"""Every variant of the kernels through `Verifier`, on the CPU and on a GPU, within the error budget of float64."""

from __future__ import annotations

import numpy as np
import pytest

from oracle.batch import verify_batch
from oracle.budget import error_budget
from tests.cases import BF16, make_batch
from tests.verifier.calls import bits, call_of, torch_call
from verify_numba import Parts, Verifier
from verify_numba.geometry import CLUSTER_FORMS, SINGLE_FORMS

VARIANTS = {
    ("cluster", 2): "cluster16", ("cluster", 3): "cluster24", ("cluster", 5): "cluster48", ("cluster", 9): "cluster72",
    ("single", 1): "single8", ("single", 9): "single24",
}  # fmt: skip
"""By form and most draft tokens, with 8 heads; `single24` has three row blocks."""
H = 8


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(params=VARIANTS, ids=VARIANTS.get)
def variant(request, device):
    """The form and T that a plan takes this variant for."""
    form, T = request.param
    if device != "cpu" and form == "cluster":
        torch = pytest.importorskip("torch")
        if torch.cuda.get_device_capability(device) < (9, 0):
            pytest.skip("clusters need compute capability 9.0")
    return form, T


def make(variant, device, **options):
    form, T = variant
    verifier = Verifier(max_bs=3, T=T, H=H, device=device, form=form, **options)
    verifier.warmup()
    return verifier


def batch_of(variant, device, layout="FULL_MASK"):
    """Prefixes of many tiles, of part of one and of none; drafts as many as may be, and fewer."""
    T, longest = variant[1], 100 if device == "cpu" else 400
    return make_batch(3, prefix=(longest, 7, 0), drafts=(T, max(1, T - 2), T), H=H, mask_layout=layout)


def run(verifier, batch, device, parts=Parts.ALL):
    """Results as NumPy arrays, over NaN in results and workspace."""
    call = call_of(batch)
    call = call if device == "cpu" else torch_call(call, device)
    verifier.poison_workspace()
    verifier.verify(call.batch, call.out, call.lse, parts=parts)
    return bits(call.out).view(BF16), bits(call.lse).view(np.float32)


def test_every_variant_is_among_them():
    assert sorted(VARIANTS.values()) == sorted(g.name for g in (*CLUSTER_FORMS, *SINGLE_FORMS))


@pytest.mark.parametrize("layout", ["FULL_MASK", "QLEN_ONLY", "CHAIN"])
def test_results_are_within_the_budget(variant, device, layout):
    verifier, batch = make(variant, device), batch_of(variant, device, layout)
    assert verifier.plan.geometry.name == VARIANTS[variant]
    for parts in Parts:
        use = error_budget(batch, parts.name).use(*run(verifier, batch, device, parts), verify_batch(batch, parts.name))
        assert use.ok, (parts, use)


def test_the_split_stays_within_the_budget(variant, device):
    """One worker writes the result itself, many leave it to the merge."""
    batch = batch_of(variant, device)
    budget, exact = error_budget(batch, "ALL"), verify_batch(batch, "ALL")
    for nsplit in (1, 5):
        use = budget.use(*run(make(variant, device, nsplit=nsplit), batch, device), exact)
        assert use.ok, (nsplit, use)


def test_lanes_that_arrive_for_themselves_change_no_bit(device):
    """Of the variant that the shipped captures take on a GPU."""
    variant = ("cluster", 9)
    if device != "cpu":
        torch = pytest.importorskip("torch")
        if torch.cuda.get_device_capability(device) < (9, 0):
            pytest.skip("clusters need compute capability 9.0")
    batch = batch_of(variant, device)
    results = [run(make(variant, device, lanes_arrive=lanes), batch, device) for lanes in (False, True)]
    for one, other in zip(*results, strict=True):
        assert np.array_equal(bits(one), bits(other))
