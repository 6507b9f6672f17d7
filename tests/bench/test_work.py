import pytest

from harness.work import FLOPS_PER_PAIR, Ceilings, Work, count_work, floor

H200 = Ceilings(read_bytes_per_s=4.13e12, mma_flops_per_s=624e12)


def test_counts_by_brute_force():
    lengths, T, H = [3, 0, 5], 2, 4
    tails = [[[1, 0], [1, 1]], [[1, 0], [0, 1]], [[1, 1], [1, 1]]]
    pairs = sum(
        length + sum(tails[b][i]) for b, length in enumerate(lengths) for i in range(T) for _ in range(H)
    )
    cells = sum(sum(map(sum, tail)) for tail in tails)
    work = count_work(lengths, T, H, cells)
    assert work.flops == pairs * FLOPS_PER_PAIR
    assert work.bytes == (3 + 0 + 5 + 3 * T) * 1152


def test_a_pair_is_1088_multiply_adds():
    assert FLOPS_PER_PAIR == 2 * 1088


@pytest.mark.parametrize(
    ("H", "L", "bytes_us", "flops_us"),
    [(8, 65536, 18.3, 16.5), (64, 65536, 18.3, 131.7), (8, 185000, 51.6, 46.5)],
)
def test_floors_of_the_target_shapes(H, L, bytes_us, flops_us):
    least = floor(count_work([L], T=9, H=H, tail_cells=0), H200)
    assert least.bytes_us == pytest.approx(bytes_us, rel=0.01)
    assert least.flops_us == pytest.approx(flops_us, rel=0.01)
    assert least.us == max(least.bytes_us, least.flops_us)


def test_bound_names_the_larger_floor():
    assert floor(count_work([65536], 9, 8, 45), H200).bound == "bytes"
    assert floor(count_work([65536], 9, 64, 45), H200).bound == "flops"


def test_rates():
    work = Work(bytes=2_000_000, flops=3_000_000_000)
    assert work.gbps(us=1000) == pytest.approx(2.0)
    assert work.tflops(us=1000) == pytest.approx(3.0)


def test_percent_is_100_at_the_floor():
    least = floor(Work(bytes=4_130_000, flops=1), H200)
    assert least.percent(least.us) == pytest.approx(100)
    assert least.percent(2 * least.us) == pytest.approx(50)
