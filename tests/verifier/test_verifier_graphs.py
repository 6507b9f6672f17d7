"""`Verifier` in CUDA graphs: captured once at dummy lengths, right for all that its buffers hold later."""

from __future__ import annotations

import ctypes

import pytest

from tests.verifier.calls import make_call, torch_call
from tests.verifier.graph_buffers import GraphBuffers
from verify_numba import Verifier

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="the GPU tests hold their buffers in torch tensors")

MAX_BS, T, H = 4, 9, 8
LENGTHS = (0, 1, 63, 64, 65, 700, 100_000)
STEPS = [
    *((n, 65) for n in LENGTHS),
    *((n,) for n in LENGTHS),
    (700, 0, 64, 1),
    (0, 0, 0, 0),
    (3000, 100_000, 63, 64),
    (),
]
"""Prefix lengths of the real requests of each replay; fewer than MAX_BS leaves padding."""


@pytest.fixture(scope="module", params=["cluster", "single"])
def verifier(request):
    if request.param == "cluster" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU has no clusters")
    made = Verifier(max_bs=MAX_BS, T=T, H=H, device="cuda:0", form=request.param)
    made.warmup()
    return made


@pytest.fixture(scope="module")
def buffers():
    return GraphBuffers("cuda:0", max_bs=MAX_BS, T=T, H=H, longest=100_000)


@pytest.fixture(scope="module")
def graph(verifier, buffers):
    """One verify step, captured at length 1 as a server does."""
    buffers.fill((1,) * MAX_BS, seed=0)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        verifier.verify(buffers.call.batch, buffers.call.out, buffers.call.lse)
    return captured


@pytest.mark.parametrize("lengths", STEPS, ids=str)
def test_a_replay_equals_an_eager_call_in_every_bit(verifier, buffers, graph, lengths):
    buffers.fill(lengths, seed=1 + STEPS.index(lengths))
    verifier.poison_workspace()
    graph.replay()
    replayed = buffers.results()
    buffers.poison()
    verifier.poison_workspace()
    verifier.verify(buffers.call.batch, buffers.call.out, buffers.call.lse)
    for one, other in zip(replayed, buffers.results(), strict=True):
        assert torch.equal(one, other)
    for request in range(len(lengths)):
        tokens = slice(request * T, (request + 1) * T)
        out, lse = buffers.exact(request)
        # Weights and results are rounded to bf16, 2^-9 each.
        error = (buffers.call.out[tokens].double() - out).norm(dim=-1) / out.norm(dim=-1)
        assert error.max() < 2**-6
        assert (buffers.call.lse[tokens].double() - lse).abs().max() < 1e-3


def test_replays_in_a_row_do_not_touch_each_other(buffers, graph):
    buffers.fill((700, 65), seed=50)
    graph.replay()
    first = buffers.results()
    for lengths in ((100_000, 3), (0,), (64, 64, 64, 64)):
        buffers.fill(lengths, seed=51)
        graph.replay()
    buffers.fill((700, 65), seed=50)
    for _ in range(20):
        buffers.poison()
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(first, buffers.results(), strict=True))


def test_a_graph_holds_the_two_kernels_and_writes_over_poison(verifier, buffers):
    buffers.fill((65, 700), seed=60)
    try:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
    except TypeError:
        pytest.skip(f"torch {torch.__version__} does not show what a graph holds")
    with torch.cuda.graph(graph):
        verifier.verify(buffers.call.batch, buffers.call.out, buffers.call.lse)
    count = ctypes.c_size_t()
    nodes = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes
    assert nodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)) == 0
    assert count.value == 2
    torch.cuda.synchronize()
    assert torch.isnan(buffers.call.out).all()
    graph.replay()
    assert torch.isfinite(buffers.call.out[: 2 * T]).all()
    assert torch.isfinite(buffers.call.lse[: 2 * T]).all()


def test_several_layers_in_one_graph(verifier):
    """Each keeps the arguments that were bound at its capture."""
    layers = [torch_call(make_call(seed=seed, prefix=(65, 3), drafts=(9, 4)), "cuda:0") for seed in range(4)]
    eager = []
    for call in layers:
        verifier.verify(call.batch, call.out, call.lse)
        eager.append(call.out.clone())
        call.out.fill_(float("nan"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in layers:
            verifier.verify(call.batch, call.out, call.lse)
    graph.replay()
    torch.cuda.synchronize()
    for call, expected in zip(layers, eager, strict=True):
        assert torch.equal(call.out, expected)
    assert not torch.equal(eager[0], eager[1])


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_cold_verifier_refuses_a_capture_and_works_afterwards(monkeypatch):
    from verify_numba.gpu import kernel_set

    cold = kernel_set.KernelSet(0)
    monkeypatch.setattr(kernel_set, "kernel_set", lambda ordinal: cold)
    verifier = Verifier(max_bs=2, T=T, H=H, device="cuda:0")
    call = torch_call(make_call(prefix=(65, 3), drafts=(9, 4)), "cuda:0")
    torch.cuda.synchronize()
    with (
        pytest.raises(kernel_set.ColdLaunchError, match=r"Call Verifier.warmup\(\) before capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        verifier.verify(call.batch, call.out, call.lse)
    torch.cuda.synchronize()
    assert torch.isnan(call.out).all()
    verifier.verify(call.batch, call.out, call.lse)
    assert torch.isfinite(call.out).all()
    graph = torch.cuda.CUDAGraph()
    eager = call.out.clone()
    with torch.cuda.graph(graph):
        verifier.verify(call.batch, call.out, call.lse)
    call.out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(call.out, eager)
