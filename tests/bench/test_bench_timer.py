import itertools
import time

import pytest

from harness import timer
from harness.timer import MAX_REPEATS, MIN_REPEATS, HostStopwatch, Timing, make_stopwatch


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
    timing = Timing("host")
    timing.measure(stopwatch, seconds=0)
    assert stopwatch.rounds > len(timing.passes[0]) == MIN_REPEATS


def test_a_pass_without_time_still_has_its_least_repeats():
    timing = Timing("host")
    timing.measure(Fixed(1.0), seconds=0)
    assert len(timing.passes[0]) == MIN_REPEATS


def test_a_fast_pass_ends_at_the_most_repeats():
    timing = Timing("host")
    timing.measure(Fixed(1.0), seconds=60)
    assert len(timing.passes[0]) == MAX_REPEATS


def test_host_stopwatch_runs_each_call_once_a_round():
    seen = []
    stopwatch = HostStopwatch([lambda: seen.append("a"), lambda: seen.append("b")])
    assert stopwatch.round() > 0
    assert seen == ["a", "b"]


def test_unknown_mode():
    with pytest.raises(KeyError):
        make_stopwatch("sundial", [])
