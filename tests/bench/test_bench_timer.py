import contextlib
import gc
import itertools
import time
import weakref

import numpy as np
import pytest

from harness import timer
from harness.timer import MAX_REPEATS, MIN_REPEATS, HostStopwatch, Timing, make_stopwatch, take_pass
from tests.benchmarks import gpu_clock


class Fixed:
    mode = "host"

    def __init__(self, *samples):
        self._samples = itertools.cycle(samples)

    def round(self):
        return next(self._samples)


class Sleeping(Fixed):
    rounds = 0

    def round(self):
        self.rounds += 1
        time.sleep(0.003)
        return 1.0


def test_median_over_passes_and_their_spread():
    timing = Timing("host", [[10.0, 11.0, 90.0], [12.0, 13.0, 14.0]])
    assert timing.medians == [11.0, 13.0]
    assert timing.us == 12.5
    assert timing.spread_percent == pytest.approx(16.0)


@pytest.fixture(autouse=True)
def no_warm_up(monkeypatch):
    monkeypatch.setattr(timer, "WARM_S", 0)


def test_the_first_rounds_are_not_counted(monkeypatch):
    monkeypatch.setattr(timer, "WARM_S", 0.01)
    stopwatch = Sleeping(1.0)
    samples = take_pass(stopwatch, seconds=0)
    assert stopwatch.rounds > len(samples) == MIN_REPEATS


def test_a_pass_without_time_still_has_its_least_repeats():
    assert len(take_pass(Fixed(1.0), seconds=0)) == MIN_REPEATS


def test_a_fast_pass_ends_at_the_most_repeats():
    assert len(take_pass(Fixed(1.0), seconds=60)) == MAX_REPEATS


def test_host_stopwatch_runs_each_call_once_a_round():
    seen = []
    stopwatch = HostStopwatch([lambda: seen.append("a"), lambda: seen.append("b")])
    assert stopwatch.round() > 0
    assert seen == ["a", "b"]


def test_unknown_mode():
    with pytest.raises(KeyError):
        make_stopwatch("sundial", [])


class FakeGraph:
    """Counts replays of what was called while it captured."""

    def __init__(self):
        self.replays = 0

    def replay(self):
        self.replays += 1


class FakeEvent:
    clock = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        FakeEvent.clock += 1.0
        self.at = FakeEvent.clock

    def elapsed_time(self, later):
        return later.at - self.at  # milliseconds


@pytest.fixture
def fake_gpu(monkeypatch):
    capturing = []

    @contextlib.contextmanager
    def graph(target):
        capturing.append(target)
        yield
        capturing.pop()

    for name, value in {
        "CUDAGraph": FakeGraph,
        "Event": FakeEvent,
        "graph": graph,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(timer.torch.cuda, name, value)
    return capturing


def test_a_graph_holds_every_call_after_two_eager_ones(fake_gpu):
    where = []
    calls = [lambda i=i: where.append((i, bool(fake_gpu))) for i in range(4)]
    stopwatch = make_stopwatch("graph", calls)
    assert where == [(0, False), (1, False), (0, True), (1, True), (2, True), (3, True)]
    assert stopwatch.round() == pytest.approx(1000 / 4)  # one millisecond over four calls


def test_a_graph_keeps_what_it_points_to(fake_gpu):
    """A graph holds addresses: a buffer that died with its call would be somebody else's at the next replay."""

    class Buffer:
        def write(self):
            pass

    buffer = Buffer()
    alive = weakref.ref(buffer)
    stopwatch = make_stopwatch("graph", [buffer.write])
    del buffer
    gc.collect()
    assert alive() is not None
    del stopwatch
    gc.collect()
    assert alive() is None


def test_eager_calls_lie_between_two_events(fake_gpu):
    ran = []
    stopwatch = make_stopwatch("eager", [lambda: ran.append(1)] * 5)
    ran.clear()
    assert stopwatch.round() == pytest.approx(1000 / 5)
    assert len(ran) == 5


def test_a_call_that_cannot_be_captured_is_heard(fake_gpu):
    def call():
        if fake_gpu:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="capturing"):
        make_stopwatch("graph", [call, call])


def test_the_clock_of_the_benchmark_suite_stays_fine_over_hours(monkeypatch):
    """Events give float32 milliseconds: a distance of hours is coarser than what is timed."""

    class Event(FakeEvent):
        def elapsed_time(self, later):
            return float(np.float32(later.at - self.at))

        def synchronize(self):
            pass

    monkeypatch.setattr(timer.torch.cuda, "Event", Event)
    monkeypatch.setattr(gpu_clock, "_state", {"last": None, "seconds": 0.0, "share": 4})
    gpu_clock.gpu_clock()
    FakeEvent.clock += 3 * 3600e3 + 0.37
    start = gpu_clock.gpu_clock()
    FakeEvent.clock += 0.1
    assert gpu_clock.gpu_clock() - start == pytest.approx((1 + 0.1) / 1e3 / 4, rel=1e-5)
