"""The settings of defragmentation, read once from the environment and checked at start.

The table of them is in docs/defragmentation.md.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass

from sglang_glue.defrag.reserve import DEFAULT_BLOCK

PREFIX = "KDTREE_DEFRAG"
_SUFFIXES = {"K": 2**10, "M": 2**20, "G": 2**30}


class Tier(enum.Enum):
    """What is done against scattered slots."""

    OFF = "off"
    SORT = "sort"
    RELOCATE = "relocate"


class DefragSettingsError(ValueError):
    """A setting has a value that it may not have; the message names both."""


@dataclass(frozen=True)
class DefragSettings:
    """Everything the environment says about defragmentation.

    ``budget_bytes`` a relocation may move, ``interval`` scheduler steps between looks, ``low`` and ``high`` mean run
    lengths in tokens at which relocation begins and ends, ``block`` slots that a decoding request grows by.
    """

    tier: Tier = Tier.OFF
    budget_bytes: int = 64 << 20
    interval: int = 256
    low: float = 8.0
    high: float = 32.0
    block: int = DEFAULT_BLOCK

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> DefragSettings:
        """Read and check the settings. Raises DefragSettingsError."""
        env = os.environ if environ is None else environ
        known = [PREFIX, *(f"{PREFIX}_{n}" for n in ("BUDGET", "INTERVAL", "LOW", "HIGH", "BLOCK"))]
        for name in env:
            if name.startswith(PREFIX) and name not in known:
                raise DefragSettingsError(f"{name} is not a setting; expected one of {', '.join(known)}")
        tier = env.get(PREFIX) or "off"
        if tier not in [t.value for t in Tier]:
            raise DefragSettingsError(
                f"{PREFIX}={tier!r}: expected one of {', '.join(t.value for t in Tier)}"
            )
        low, high = _tokens(env, "LOW", cls.low), _tokens(env, "HIGH", cls.high)
        if low > high:
            raise DefragSettingsError(
                f"{PREFIX}_LOW={low:g}: expected at most {PREFIX}_HIGH, which is {high:g}"
            )
        return cls(
            tier=Tier(tier),
            budget_bytes=_bytes(env, "BUDGET", "64M"),
            interval=_whole(env, "INTERVAL", cls.interval, 1),
            low=low,
            high=high,
            block=_whole(env, "BLOCK", cls.block, 0),
        )


def _whole(env: Mapping[str, str], suffix: str, default: int, least: int) -> int:
    text = env.get(f"{PREFIX}_{suffix}") or str(default)
    if not text.isdecimal() or int(text) < least:
        raise DefragSettingsError(f"{PREFIX}_{suffix}={text!r}: expected a whole number of at least {least}")
    return int(text)


def _tokens(env: Mapping[str, str], suffix: str, default: float) -> float:
    text = env.get(f"{PREFIX}_{suffix}") or str(default)
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 1 <= value <= 1e9:
        raise DefragSettingsError(f"{PREFIX}_{suffix}={text!r}: expected a run length in tokens, 1 or more")
    return value


def _bytes(env: Mapping[str, str], suffix: str, default: str) -> int:
    text = env.get(f"{PREFIX}_{suffix}") or default
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not digits.isdecimal() or int(digits) < 1 or (unit and unit not in _SUFFIXES):
        raise DefragSettingsError(f"{PREFIX}_{suffix}={text!r}: expected bytes, as in 64M or 1G")
    return int(digits) * _SUFFIXES.get(unit, 1)
