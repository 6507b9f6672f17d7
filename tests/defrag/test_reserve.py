"""Growth in blocks: never less than wanted, never past the row, given up when the pool is short."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_glue.defrag.reserve import reserved_lengths

lengths = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 40)), min_size=1, max_size=8)


@given(lengths, st.integers(0, 100), st.integers(600, 700), st.integers(0, 3000))
def test_laws(pairs: list[tuple[int, int]], block: int, width: int, room: int) -> None:
    current = [a for a, _ in pairs]
    wanted = [a + more for a, more in pairs]
    got = reserved_lengths(current, wanted, block=block, width=width, room=room)
    assert all(g >= w for g, w in zip(got, wanted, strict=True))
    assert all(g <= width for g in got)
    assert all(g == c for g, c, w in zip(got, current, wanted, strict=True) if w == c), "grew without a need"
    if got != wanted:
        assert sum(got) - sum(current) <= room


def test_growth_is_whole_blocks() -> None:
    assert reserved_lengths([10, 20], [13, 20], block=64, width=1000, room=1000) == [74, 20]
    assert reserved_lengths([10], [10 + 65], block=64, width=1000, room=1000) == [138]


def test_a_row_s_end_and_a_short_pool_stop_it() -> None:
    assert reserved_lengths([10], [13], block=64, width=50, room=1000) == [50]
    assert reserved_lengths([10, 30], [13, 33], block=64, width=1000, room=255) == [13, 33]
