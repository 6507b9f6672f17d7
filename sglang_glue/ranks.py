"""No tensor-parallel rank is left alone with Triton: the rule, and the two places where it is kept.

**At the start** the ranks agree. When a backend is built, each says whether it can serve it (one small all-gather over
SGLang's CPU group, with a time limit); if one cannot, all leave the backend to Triton. A rank that does not answer ends
the start, and so does an error of ours while CUDA graphs are captured: a captured launch stays as it is for the life of
the server, so that rank could never join the others again.

**While serving** nothing is exchanged. What is declined (`sglang_glue.eligibility`) follows from shapes and settings
that are the same on every rank, so that all decline together. An error of ours in an eager step raises a flag in
memory that the ranks of one host share; from its next eager call on every rank reads it and leaves eager steps to
Triton, until a restart. Replays of captured graphs run none of our Python code and stay as they are, on all ranks
alike. The one call that failed was served by Triton on one rank only; that is harmless, since a rank computes its own
heads and all ranks continue from the same sum over them.
"""

from __future__ import annotations

import logging
import mmap
from datetime import timedelta
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

AGREE_S = 300.0
"""Longer than one rank's compilation of the kernels, which the others may wait for."""

_MESSAGE = 256
_RAISED = b"\x01"


class RanksApart(RuntimeError):
    """The ranks cannot be held together; the one error of ours that ends a server, and only while it starts."""


class FallbackFlag:
    """A flag and a message in memory that every rank of one host maps; raised once, never lowered.

    Raises OSError where the file cannot be made.
    """

    def __init__(self, run_folder: Path, rank: str) -> None:
        self._rank = rank
        self._told = False
        path = run_folder / "fallback"
        with path.open("ab") as file:  # the first rank makes it; appending truncates nothing
            file.truncate(mmap.PAGESIZE)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    @property
    def is_raised(self) -> bool:
        """Whether a rank fell back. One byte of memory is read; the first True is logged."""
        if self._memory[:1] != _RAISED:
            return False
        if not self._told:
            self._told = True
            log.error("verify-numba: %s; every rank leaves eager steps to Triton until a restart", self.message)
        return True

    def raise_it(self, error: Exception) -> None:
        """This rank fell back because of `error`; the first rank to say so is remembered."""
        if self._memory[:1] == _RAISED:
            return
        text = f"{self._rank} fell back: {type(error).__name__}: {error}".encode()[: _MESSAGE - 1]
        self._memory[1 : 1 + len(text)] = text
        self._memory[:1] = _RAISED

    @property
    def message(self) -> str | None:
        """Which rank fell back, and why; None while none did."""
        if self._memory[:1] != _RAISED:
            return None
        return self._memory[1:_MESSAGE].rstrip(b"\0").decode(errors="replace")


def agreed_reason(rank: str, reason: str | None, group: Any, timeout_s: float = AGREE_S) -> str | None:
    """Why a backend is left to Triton on every rank of `group`, or None where all can serve it.

    Every rank calls this once a backend, with its own `reason` not to serve it. Raises RanksApart where one does not
    answer within `timeout_s`.
    """
    import torch
    import torch.distributed as dist

    said = "" if reason is None else f"{rank}: {reason}"
    mine = torch.zeros(_MESSAGE, dtype=torch.uint8)
    text = said.encode()[:_MESSAGE]
    mine[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    every = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
    try:
        dist.all_gather(every, mine, group=group, async_op=True).wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RanksApart(
            f"verify-numba: {rank}: not every rank said within {timeout_s:.0f} s whether it can serve this backend;"
            " start all ranks with the same KDTREE_ settings and the plug-in installed, or with KDTREE_VERIFY=off"
        ) from error
    reasons = [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in every]
    others = [text for text in reasons if text]
    return None if not others else reason or others[0]
