"""The real thing: toy kernels loaded and launched on a GPU."""

from __future__ import annotations

import time

import pytest
import toy_kernels

from verify_numba.gpu.cache import CubinCache
from verify_numba.gpu.driver import CudaUnavailable, get_driver
from verify_numba.gpu.kernel_set import ColdLaunchError, KernelSet, UnsupportedKernel

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="the GPU tests hold their buffers in torch tensors")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> KernelSet:
    """A set with a cold cache, in torch's context of GPU 0."""
    try:
        get_driver()
    except CudaUnavailable as reason:
        pytest.skip(str(reason))
    if not torch.cuda.is_available():
        pytest.skip("this torch was built without CUDA")
    torch.cuda.init()
    torch.zeros(1, device="cuda:0")
    return KernelSet(0, cache=CubinCache(tmp_path_factory.mktemp("cubins")))


def needs_clusters(kernels: KernelSet) -> None:
    if kernels.gpu.cc < (9, 0):
        pytest.skip(f"{kernels.gpu.name} has no clusters")


def current_stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def test_properties_agree_with_torch(kernels):
    properties = torch.cuda.get_device_properties(0)
    assert kernels.gpu.name == properties.name
    assert kernels.gpu.cc == (properties.major, properties.minor)
    assert kernels.gpu.sm_count == properties.multi_processor_count
    assert kernels.gpu.l2_bytes == properties.L2_cache_size
    assert kernels.gpu.smem_block == properties.shared_memory_per_block_optin


def test_a_kernel_runs_on_a_side_stream(kernels):
    out = torch.full((1000,), float("nan"), device="cuda")
    side = torch.cuda.Stream()
    fill = kernels.load(toy_kernels.FILL)
    fill.set_grid(8)
    fill.bind(out.data_ptr(), 999, 2.5)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fill.launch(current_stream())
    side.synchronize()
    assert (out[:999] == 2.5).all()
    assert out[999].isnan()


def test_a_graph_replays_the_arguments_of_its_capture(kernels):
    out = torch.zeros(256, device="cuda")
    fill = kernels.load(toy_kernels.FILL)
    fill.set_grid(2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill.bind(out.data_ptr(), 256, 7.0)
        fill.launch(current_stream())
    torch.cuda.synchronize()
    assert (out == 0).all(), "a capture must not run the kernel"
    fill.bind(out.data_ptr(), 256, 1.0)
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 7.0).all()


def test_a_cold_kernel_is_refused_in_a_capture_and_the_capture_survives(kernels):
    out = torch.zeros(128, device="cuda")
    fill = kernels.load(toy_kernels.FILL)
    cold = toy_kernels.shared_ends(4096)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ColdLaunchError, match="warmup"):
            kernels.load(cold, current_stream())
        fill.bind(out.data_ptr(), 128, 3.0)
        fill.launch(current_stream())
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 3.0).all()
    kernels.load(cold, current_stream())


@pytest.mark.parametrize("smem_bytes", [1024, 48 * 1024, 48 * 1024 + 16, 99 * 1024])
def test_all_dynamic_shared_memory_can_be_used(kernels, smem_bytes):
    out = torch.zeros(2, device="cuda")
    ends = kernels.load(toy_kernels.shared_ends(smem_bytes))
    ends.bind(out.data_ptr(), smem_bytes // 4, 5.0)
    ends.launch(current_stream())
    assert out.tolist() == [5.0, 6.0]


def test_the_largest_block_loads_and_a_larger_one_is_refused(kernels):
    limit = kernels.gpu.smem_block
    kernels.load(toy_kernels.shared_ends(limit))
    with pytest.raises(UnsupportedKernel, match=f"{limit:,} B"):
        kernels.load(toy_kernels.shared_ends(limit + 16))


def test_a_cluster_kernel_sees_its_ranks(kernels):
    needs_clusters(kernels)
    out = torch.full((8,), -1.0, device="cuda")
    ranks = kernels.load(toy_kernels.RANKS)
    ranks.set_grid(8)
    ranks.bind(out.data_ptr(), 8, 10.0)
    ranks.launch(current_stream())
    assert out.tolist() == [10.0, 11.0] * 4


def test_early_launch_and_clusters_are_captured(kernels):
    needs_clusters(kernels)
    out, order = torch.zeros(128, device="cuda"), torch.zeros(2, device="cuda")
    early, ranks = kernels.load(toy_kernels.EARLY), kernels.load(toy_kernels.RANKS)
    ranks.set_grid(2)
    early.bind(out.data_ptr(), 128, 4.0)
    ranks.bind(order.data_ptr(), 2, 0.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ranks.launch(current_stream())
        early.launch(current_stream())
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 4.0).all()
    assert order.tolist() == [0.0, 1.0]


def test_nothing_spills_and_registers_are_reported(kernels):
    fill = kernels.load(toy_kernels.FILL).function
    assert fill.local_bytes == 0
    assert 0 < fill.registers <= 255


def test_launches_allocate_no_device_memory(kernels):
    out = torch.zeros(128, device="cuda")
    fill = kernels.load(toy_kernels.FILL)
    fill.bind(out.data_ptr(), 128, 1.0)

    def free_after_launches() -> int:
        for _ in range(1000):
            fill.launch(current_stream())
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    assert free_after_launches() == free_after_launches()


def test_host_cost_of_two_launches(kernels, capsys):
    """Two launches with all arguments set anew and torch's stream asked for; printed, not judged."""
    out = torch.zeros(128, device="cuda")
    first, second = kernels.load(toy_kernels.FILL), kernels.load(toy_kernels.FILL)
    batch = 100

    def call():
        stream = current_stream()
        for kernel in (first, second):
            kernel.bind(out.data_ptr(), 128, 1.0)
            kernel.launch(stream)

    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        times.append((time.perf_counter() - start) / batch)
    torch.cuda.synchronize()
    with capsys.disabled():
        print(f"\nhost cost of two launches: {1e6 * sorted(times)[len(times) // 2]:.2f} us (median)")
    assert (out == 1.0).all()
