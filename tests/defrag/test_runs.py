"""The fragmentation metric against counts made token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_glue.defrag import runs


def slow_lengths(slots: list[int]) -> list[int]:
    lengths: list[int] = []
    for i, slot in enumerate(slots):
        if i and slot == slots[i - 1] + 1:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


@given(st.lists(st.integers(1, 40), max_size=60))
def test_run_lengths_agree_with_a_token_by_token_count(slots: list[int]) -> None:
    array = np.array(slots, np.int64)
    assert runs.run_lengths(array).tolist() == slow_lengths(slots)
    assert runs.count_runs(array) == len(slow_lengths(slots))


@given(st.sets(st.integers(1, 60), max_size=50), st.randoms())
def test_the_free_list_is_a_set(slots: set[int], random) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(slots)
    random.shuffle(shuffled)
    firsts, lengths = runs.runs_of_set(np.array(shuffled, np.int64))
    covered = [s for first, n in zip(firsts, lengths, strict=True) for s in range(first, first + n)]
    assert covered == sorted(slots)
    assert lengths.tolist() == slow_lengths(sorted(slots))


def test_statistics_of_known_lengths() -> None:
    stats = runs.summarise(np.array([1, 1, 2, 100], np.int64))
    assert (stats.tokens, stats.runs, stats.longest) == (104, 4, 100)
    assert stats.mean == pytest.approx(26.0)
    assert stats.typical == 100, "the median token lies in the run of 100"
    assert stats.histogram[:7] == (2, 1, 0, 0, 0, 0, 1)


def test_a_run_never_spans_two_requests() -> None:
    stats = runs.row_stats([np.arange(1, 5), np.arange(5, 9)])
    assert (stats.runs, stats.tokens) == (2, 8)


def test_empty_lists_have_no_runs() -> None:
    assert runs.row_stats([]) == runs.EMPTY
    assert runs.free_stats(np.empty(0, np.int64)) == runs.EMPTY
    assert runs.mean_run([np.empty(0, np.int64)]) == 0.0


def test_typical_lies_at_the_median_token() -> None:
    assert runs.summarise(np.full(9, 4)).typical == 4
    assert runs.summarise(np.array([1] * 50 + [50])).typical == 1
