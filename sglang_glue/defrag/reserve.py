"""Decode growth in blocks: what keeps the output of requests that decode together from interleaving.

A decode step gives every running request a few slots out of one allocation, so without this a request's output lies
in runs of the few tokens it accepts a step, whatever the order of the free list. SGLang over-allocates speculative
requests anyway and frees the excess when they end; here the growth is rounded up to ``block`` slots, which then come
in one run. It costs at most ``block`` slots a running request and is dropped when the pool has no room to spare.
"""

from __future__ import annotations

from collections.abc import Sequence

DEFAULT_BLOCK = 64
"""Slots a request grows by; as long as the prefix kernel needs to read runs at full speed."""


def reserved_lengths(
    current: Sequence[int], wanted: Sequence[int], *, block: int, width: int, room: int
) -> list[int]:
    """Allocated lengths [bs] to go to, from ``current`` [bs] lengths and the ``wanted`` [bs] ones of this step.

    Requests that need no slot now get none. ``width`` is the longest row of the request table; ``room`` is how many
    slots are free or evictable. Returns ``wanted`` when the blocks would leave less than a block a request.
    """
    if block <= 1:
        return list(wanted)
    blocks = [
        have if need <= have else min(max(need, have + -(-(need - have) // block) * block), max(need, width))
        for have, need in zip(current, wanted, strict=True)
    ]
    total = sum(blocks) - sum(current)
    return blocks if total + block * len(blocks) <= room else list(wanted)
