"""The settings of the plug-in, read once from the environment and checked at start (table in docs/serving.md)."""

from __future__ import annotations

import enum
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PREFIX = "KDTREE_"
FOREIGN_PREFIXES = ("KDTREE_DEFRAG",)
"""Settings under our prefix that another part of the project reads and checks."""

_SUFFIXES = {"K": 2**10, "M": 2**20, "G": 2**30}


class SettingsError(ValueError):
    """A setting has a value that it may not have; the message names both."""


class Mode(enum.Enum):
    """What the plug-in does with an eligible verify call."""

    OFF = "off"
    VALIDATE = "validate"
    ON = "on"


class CaptureWhen(enum.Enum):
    """Which of the sampled calls are kept."""

    ALL = "all"
    MISMATCH = "mismatch"


@dataclass(frozen=True)
class CaptureSettings:
    """Which eager verify calls are written to `folder`, and how much may be."""

    folder: Path
    layers: frozenset[int] | None  # None: every layer
    every: int  # one of so many verify steps
    when: CaptureWhen
    max_prefix: int  # prefix tokens of the whole batch, at most
    max_bytes: int  # of all cases in the folder together


@dataclass(frozen=True)
class Settings:
    """Everything the environment says about the plug-in."""

    mode: Mode
    nsplit: int | None
    form: str
    threshold: float
    status_folder: Path
    capture: CaptureSettings | None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read and check all settings. Raises `SettingsError`."""
        env = os.environ if environ is None else environ
        _refuse_unknown_names(env)
        mode = Mode(_choice(env, "KDTREE_VERIFY", "off", [m.value for m in Mode]))
        return cls(
            mode=mode,
            nsplit=_nsplit(env),
            form=_choice(env, "KDTREE_FORM", "auto", ["auto", "cluster", "single"]),
            threshold=_threshold(env),
            status_folder=Path(env.get("KDTREE_STATUS") or default_status_folder()).absolute(),
            capture=_capture(env, mode),
        )


KNOWN = (
    "KDTREE_VERIFY",
    "KDTREE_NSPLIT",
    "KDTREE_FORM",
    "KDTREE_THRESHOLD",
    "KDTREE_STATUS",
    "KDTREE_CAPTURE",
    "KDTREE_CAPTURE_LAYERS",
    "KDTREE_CAPTURE_EVERY",
    "KDTREE_CAPTURE_WHEN",
    "KDTREE_CAPTURE_MAX_PREFIX",
    "KDTREE_CAPTURE_BYTES",
)


def default_status_folder() -> Path:
    """Where counter files go unless KDTREE_STATUS says otherwise: one folder a user."""
    return Path(tempfile.gettempdir()) / f"verify-numba-{os.getuid()}"


def _refuse_unknown_names(env: Mapping[str, str]) -> None:
    # A misspelt KDTREE_VERIFY would otherwise mean "off" without a word.
    for name in env:
        if name.startswith(PREFIX) and name not in KNOWN and not name.startswith(FOREIGN_PREFIXES):
            raise SettingsError(f"{name} is not a setting; expected one of {', '.join(KNOWN)}")


def _choice(env: Mapping[str, str], name: str, default: str, allowed: list[str]) -> str:
    value = env.get(name) or default
    if value not in allowed:
        raise SettingsError(f"{name}={value!r}: expected one of {', '.join(allowed)}")
    return value


def _positive(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name) or str(default)
    if not text.isdecimal() or int(text) < 1:
        raise SettingsError(f"{name}={text!r}: expected a whole number of at least 1")
    return int(text)


def _nsplit(env: Mapping[str, str]) -> int | None:
    text = env.get("KDTREE_NSPLIT") or "auto"
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise SettingsError(f"KDTREE_NSPLIT={text!r}: expected auto or a whole number of at least 1")
    return int(text)


def _threshold(env: Mapping[str, str]) -> float:
    text = env.get("KDTREE_THRESHOLD") or "0.01"
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value <= 1:
        raise SettingsError(f"KDTREE_THRESHOLD={text!r}: expected a number above 0 and at most 1")
    return value


def _bytes(env: Mapping[str, str], name: str, default: str) -> int:
    text = env.get(name) or default
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not digits.isdecimal() or int(digits) < 1 or (unit and unit not in _SUFFIXES):
        raise SettingsError(f"{name}={text!r}: expected bytes, as in 500000000, 500M or 2G")
    return int(digits) * _SUFFIXES.get(unit, 1)


def _layers(env: Mapping[str, str]) -> frozenset[int] | None:
    text = env.get("KDTREE_CAPTURE_LAYERS") or "0"
    if text == "all":
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise SettingsError(f"KDTREE_CAPTURE_LAYERS={text!r}: expected all or layer numbers, as in 0,30,60")
    return frozenset(int(part) for part in parts)


def _capture(env: Mapping[str, str], mode: Mode) -> CaptureSettings | None:
    given = [name for name in KNOWN if name.startswith("KDTREE_CAPTURE_") and env.get(name)]
    if not env.get("KDTREE_CAPTURE"):
        if given:
            raise SettingsError(f"{given[0]} is set, but KDTREE_CAPTURE names no folder")
        return None
    if mode is Mode.OFF:
        raise SettingsError("KDTREE_CAPTURE needs KDTREE_VERIFY=validate or on: off patches nothing")
    when = CaptureWhen(_choice(env, "KDTREE_CAPTURE_WHEN", "all", [w.value for w in CaptureWhen]))
    if when is CaptureWhen.MISMATCH and mode is not Mode.VALIDATE:
        raise SettingsError("KDTREE_CAPTURE_WHEN=mismatch needs KDTREE_VERIFY=validate: on compares nothing")
    return CaptureSettings(
        folder=_writable_folder(env["KDTREE_CAPTURE"]),
        layers=_layers(env),
        every=_positive(env, "KDTREE_CAPTURE_EVERY", 100),
        when=when,
        max_prefix=_positive(env, "KDTREE_CAPTURE_MAX_PREFIX", 8192),
        max_bytes=_bytes(env, "KDTREE_CAPTURE_BYTES", "1G"),
    )


def _writable_folder(text: str) -> Path:
    folder = Path(text).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"KDTREE_CAPTURE={text!r}: {error.strerror or error}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SettingsError(f"KDTREE_CAPTURE={text!r}: the folder cannot be written to")
    return folder
