import pytest
import torch

from harness.bench_inputs import PAGE, Coldness, Workload, make_pool, pool_slots, random_trees
from harness.bench_shapes import CONTIGUOUS, SCATTERED, BenchShape
from verify_numba.dims import ROW_BYTES

CPU = torch.device("cpu")
COLD = Coldness(bytes=0, min_sets=3)
LENGTHS = (130, 0, 64)


def make_work(run_length=SCATTERED, lengths=LENGTHS, T=5, H=2):
    shape = BenchShape(lengths, T, H, run_length)
    return Workload(shape, make_pool(pool_slots([shape], COLD, 4096), CPU, seed=0), COLD, seed=0)


@pytest.mark.parametrize("run_length", [SCATTERED, 4, 16, CONTIGUOUS])
def test_no_slot_is_shared_by_two_sets(run_length):
    work = make_work(run_length)
    slots = torch.cat([s for requests in work.sets for s in requests])
    assert slots.unique().numel() == slots.numel() == 3 * (sum(LENGTHS) + 3 * 5)
    assert 0 <= int(slots.min()) and int(slots.max()) < work.pool.shape[0]


@pytest.mark.parametrize("run_length", [4, 16])
def test_slots_come_in_runs(run_length):
    slots = make_work(run_length).sets[0][0]
    whole = slots[: slots.numel() // run_length * run_length].view(-1, run_length)
    assert (whole.diff(dim=1) == 1).all()
    assert (whole[:-1, -1] + 1 != whole[1:, 0]).any()


def test_contiguous_requests_start_on_a_page():
    for requests in make_work(CONTIGUOUS).sets:
        for slots in requests:
            assert int(slots[0]) % PAGE == 0
            assert (slots.diff() == 1).all()


@pytest.mark.parametrize("run_length", [SCATTERED, 4])
def test_rows_of_different_sets_are_never_neighbours(run_length):
    work = make_work(run_length)
    owner = torch.full((work.pool.shape[0],), -1)
    for index, requests in enumerate(work.sets):
        owner[torch.cat(requests)] = index
    pairs = torch.stack([owner[:-1], owner[1:]])
    both = (pairs >= 0).all(dim=0)
    assert (pairs[0, both] == pairs[1, both]).all()


def test_scattered_slots_spread_over_the_pool():
    work = make_work(SCATTERED, lengths=(500,))
    slots = work.sets[0][0]
    assert int((slots.diff() == 1).sum()) == 0
    assert int(slots.max()) - int(slots.min()) > 0.9 * work.pool.shape[0]
    assert int((slots.diff() < 0).sum()) > 100  # not sorted


@pytest.mark.parametrize("run_length", [SCATTERED, 16, CONTIGUOUS])
def test_each_set_is_the_first_one_moved(run_length):
    work = make_work(run_length)
    for index, requests in enumerate(work.sets):
        for moved, slots in zip(requests, work.sets[0], strict=True):
            assert torch.equal(moved, slots + index * work.shift)


def test_draft_rows_are_in_the_pool_of_every_set():
    work = make_work()
    for requests in work.sets:
        tail = torch.cat([slots[-5:] for slots in requests])
        assert torch.equal(work.pool[tail], work.k)


def test_kv_indices_are_the_prefixes():
    work = make_work()
    for indices, requests in zip(work.kv_indices, work.sets, strict=True):
        for b, slots in enumerate(requests):
            start, end = work.kv_indptr[b : b + 2].tolist()
            assert torch.equal(indices[start:end], slots[: LENGTHS[b]])


def test_mask_is_laid_out_with_the_prefix_stride():
    work = make_work()
    for b, length in enumerate(LENGTHS):
        start, end = work.mask_indptr[b : b + 2].tolist()
        rows = work.custom_mask[start:end].view(5, length + 5)
        assert rows[:, :length].all()
        assert torch.equal(rows[:, length:], work.tree[b])


@pytest.mark.parametrize("run_length", [SCATTERED, CONTIGUOUS])
def test_pages_cover_each_request_and_are_disjoint(run_length):
    work = make_work(run_length)
    pages = torch.cat([p for requests in work.page_sets for p in requests])
    assert pages.unique().numel() == pages.numel()
    assert int(pages.max()) < work.pool.shape[0] // PAGE
    for index in range(work.n_sets):
        assert [s.numel() for s in work.slots_of_pages(index)] == [length + 5 for length in LENGTHS]


def test_contiguous_pages_hold_the_same_slots():
    work = make_work(CONTIGUOUS)
    for own, shared in zip(work.slots_of_pages(1), work.sets[1], strict=True):
        assert torch.equal(own, shared)


def test_trees_see_themselves_and_their_ancestors_only():
    trees = random_trees(bs=3, T=16, seed=1)
    assert trees.diagonal(dim1=1, dim2=2).all()
    assert not trees.triu(1).any()
    seen = trees.double()
    assert ((seen @ seen > 0) == trees).all()  # an ancestor's ancestors are ancestors
    assert trees.sum() < 3 * 16 * 17 / 2  # not a chain


def test_enough_sets_to_be_cold():
    shape = BenchShape((4096,), T=9, H=8)
    assert Coldness().sets(shape) * (4096 + 9) * ROW_BYTES >= 400e6
    assert Coldness().sets(BenchShape((1_000_000,), T=9, H=8)) == 3


def test_the_same_seed_gives_the_same_workload():
    a, b = make_work(), make_work()
    assert torch.equal(a.q, b.q) and torch.equal(a.kv_indices[2], b.kv_indices[2])
