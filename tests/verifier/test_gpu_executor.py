"""The launches of a step, seen from the host: which values, in which order, on which stream. Runs without a GPU."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from tests.verifier.calls import H, T, make_call, torch_call
from verify_numba import Parts, make_plan
from verify_numba.binding import Binder
from verify_numba.kernels.merge_kernel import make_merge_kernel
from verify_numba.kernels.verify_kernel import make_verify_kernel
from verify_numba.lockstep.ops import numpy_ops
from verify_numba.variants import merge_spec, verify_spec
from verify_numba.verifier import LOG2_E

torch = pytest.importorskip("torch")


class Launcher:
    """Stands in for a LoadedKernel and notes what is asked of it."""

    def __init__(self, spec, log):
        self.spec, self.log = spec, log

    def set_grid(self, *grid):
        self.log.append((self.spec.name, "grid", grid))

    def bind(self, *values):
        self.log.append((self.spec.name, "bind", values))

    def launch(self, stream):
        self.log.append((self.spec.name, "launch", stream))


class Kernels:
    """Stands in for the KernelSet of GPU 1."""

    def __init__(self, cc, log):
        self.gpu = SimpleNamespace(ordinal=1, cc=cc, sm_count=132)
        self.log = log

    def load(self, spec, stream):
        self.log.append((spec.name, "load", stream))
        return Launcher(spec, self.log)


@pytest.fixture(params=[(9, 0), (8, 9)], ids=["sm_90", "sm_89"])
def cc(request):
    return request.param


@pytest.fixture
def log():
    return []


@pytest.fixture
def executor(monkeypatch, cc, log):
    from verify_numba import executor_gpu

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: empty(*shape, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda ordinal: SimpleNamespace(cuda_stream=100 + ordinal))
    monkeypatch.setattr(executor_gpu, "_current_stream", lambda ordinal: 100 + ordinal)
    monkeypatch.setattr(executor_gpu, "_current_device", lambda: 1)
    made = executor_gpu.GpuExecutor(make_plan(max_bs=4, T=T, H=H, cc=cc, sm_count=132), Kernels(cc, log))
    monkeypatch.setattr(torch, "empty", empty)
    return made


def bound_call(call):
    return Binder(max_bs=4, T=T, H=H, device=-1).bind(call.batch, call.out, call.lse)


def run(executor, call, parts=Parts.ALL):
    executor.run(bound_call(call), parts.value, call.batch, call.out, call.lse)


def of(log, name, what):
    return [value for kernel, event, value in log if kernel.startswith(name) and event == what]


def named(make, *args):
    """The parameters of a kernel, in its own order."""
    return list(inspect.signature(make(*args)).parameters)


def test_the_kernels_get_their_parameters_by_name(executor, log):
    call, plan = torch_call(make_call(q_layout="heads-first")), executor.plan
    run(executor, call, Parts.PREFIX)
    form, addresses, _ = bound_call(call)
    q, k, pool, qo, kv, slots, mask, starts, out, lse = addresses
    shared = {
        "qo_indptr": qo, "kv_indptr": kv, "widths": form.widths, "parts": Parts.PREFIX.value, "bs": 2, "H": H,
        "min_tiles": plan.min_tiles, "out": out, "lse": lse,
        "part_o": executor._part_o.data_ptr(), "part_lse": executor._part_lse.data_ptr(),
    }  # fmt: skip
    verify = shared | {
        "q": q, "q_token_stride": 2 * 576, "q_head_stride": 13 * 2 * 576, "k": k, "k_stride": 1152,
        "pool": pool, "pool_stride": 1152, "kv_indices": slots, "mask": mask, "mask_indptr": starts,
        "layout": call.batch.mask_layout.value, "scale": pytest.approx(call.batch.sm_scale * LOG2_E),
    }  # fmt: skip
    merge = shared | {"workers": plan.workers, "row_capacity": plan.row_capacity}
    ops = numpy_ops(plan.geometry)
    for name, make, values in (
        ("verify", lambda: make_verify_kernel(plan.geometry, ops), verify),
        ("merge", lambda: make_merge_kernel(ops), merge),
    ):
        (bound,) = of(log, name, "bind")
        parameters = named(make)
        assert sorted(parameters) == sorted(values)
        assert dict(zip(parameters, bound, strict=True)) == values


def test_verify_goes_first_then_merge_on_the_current_stream(executor, log):
    run(executor, torch_call(make_call()))
    launches = [(name, value) for name, event, value in log if event == "launch"]
    assert launches == [(executor._loaded[0].spec.name, 101), (executor._loaded[1].spec.name, 101)]
    assert executor._loaded[0].spec is verify_spec(executor.plan.geometry)


def test_kernels_are_loaded_once_and_overlap_where_the_gpu_can(executor, log, cc):
    executor.warmup()
    for _ in range(3):
        run(executor, torch_call(make_call()))
    loads = [name for name, event, _ in log if event == "load"]
    assert loads == [verify_spec(executor.plan.geometry).name, merge_spec(cc >= (9, 0)).name]


def test_grids_follow_the_plan_and_the_batch(executor, log):
    for drafts in ((9, 4), (9, 4), (3,), (9, 4)):
        run(executor, torch_call(make_call(prefix=(5,) * len(drafts), drafts=drafts)))
    assert of(log, "verify", "grid") == [executor.plan.grid]
    assert of(log, "merge", "grid") == [(executor.plan.merge_blocks, bs) for bs in (2, 1, 2)]


def test_another_current_gpu_is_put_back(executor, log, monkeypatch):
    from verify_numba import executor_gpu

    entered = []

    @contextmanager
    def device(ordinal):
        entered.append(("in", ordinal))
        yield
        entered.append(("out", len(of(log, "merge", "launch"))))

    monkeypatch.setattr(executor_gpu, "_current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    run(executor, torch_call(make_call()))
    assert entered == [("in", 1), ("out", 1)]


def test_the_workspace_is_the_plans_and_can_be_poisoned(executor):
    assert executor._part_o.nbytes == executor.plan.part_o_bytes
    assert executor._part_lse.nbytes == executor.plan.part_lse_bytes
    executor.poison_workspace()
    assert torch.isnan(executor._part_o).all()
    assert torch.isnan(executor._part_lse).all()
