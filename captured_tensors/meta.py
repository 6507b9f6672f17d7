"""What a capture says about itself beside its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from captured_tensors.schema import MASK_LAYOUTS, CaptureError, fail
from verify_numba.dims import D_QK, D_V

_FIXED = {"qk_head_dim": str(D_QK), "v_head_dim": str(D_V), "page_size": "1"}
"""Entries that may be absent; when present they must say this."""


@dataclass(frozen=True)
class CaptureMeta:
    """Scalars and provenance of one captured verify step.

    Raises:
        CaptureError: a scalar is out of its range or the mask layout is unknown.
    """

    sm_scale: float
    """Softmax scale, applied to the raw scores."""
    num_heads: int
    """H, query heads on the rank that was captured."""
    max_extend_len: int
    """T, the draft budget of a request, root included; a request may hold fewer tokens."""
    layer_id: int
    pool_slots: int
    """Slots of the KV pool that the captured slot numbers refer to."""
    algorithm: str = "unknown"
    """Speculation that drew the trees, for example ``NGRAM`` or ``EAGLE topk=4 steps=4``."""
    mode: str = "unknown"
    """Forward mode, and whether the step ran eagerly or in a graph."""
    mask_layout: str = "FULL_MASK"
    """How ``custom_mask`` is laid out: FULL_MASK, QLEN_ONLY, or CHAIN for no mask at all."""
    model: str = "unknown"
    gpu: str = "unknown"
    sglang: str = "unknown"
    torch: str = "unknown"
    triton: str = "unknown"
    extra: Mapping[str, str] = field(default_factory=dict)
    """Entries that the schema has no name for, kept as they are."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sm_scale) and self.sm_scale > 0):
            raise fail("sm_scale", self.sm_scale, "a finite number above 0")
        for name in ("num_heads", "max_extend_len", "pool_slots"):
            if getattr(self, name) < 1:
                raise fail(name, getattr(self, name), "1 or more")
        if self.layer_id < 0:
            raise fail("layer_id", self.layer_id, "0 or more")
        if self.mask_layout not in MASK_LAYOUTS:
            raise fail("mask_layout", repr(self.mask_layout), " or ".join(MASK_LAYOUTS))
        named = sorted(set(self.extra) & {f.name for f in fields(self)})
        if named:
            raise fail(
                "extra", f"the named entries {', '.join(named)}", "entries without a name of their own"
            )
        object.__setattr__(self, "extra", MappingProxyType(dict(self.extra)))

    @classmethod
    def from_strings(cls, entries: Mapping[str, str]) -> CaptureMeta:
        """Read the string entries of a file's header.

        Raises:
            CaptureError: an entry is missing, is not a number, or has a value that is not supported.
        """
        _check_supported(entries)
        names = {f.name for f in fields(cls)} - {"extra"}
        named: dict[str, str | int | float] = {}
        for key in names & set(entries):
            named[key] = _parse(key, entries[key])
        missing = sorted({"sm_scale", *_INTEGERS} - set(entries))
        if missing:
            raise CaptureError(f"metadata missing: {', '.join(missing)}")
        extra = {key: value for key, value in entries.items() if key not in names}
        return cls(**named, extra=extra)  # type: ignore[arg-type]

    def to_strings(self) -> dict[str, str]:
        """The header entries; ``from_strings`` gives this object back."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "extra"}
        return {**{key: str(value) for key, value in named.items()}, **self.extra}


_INTEGERS = ("num_heads", "max_extend_len", "layer_id", "pool_slots")


def _parse(key: str, text: str) -> str | int | float:
    kind = float if key == "sm_scale" else int if key in _INTEGERS else str
    try:
        return kind(text)
    except ValueError:
        raise fail(f"metadata {key}", repr(text), f"a number ({kind.__name__})") from None


def _check_supported(entries: Mapping[str, str]) -> None:
    for key, want in _FIXED.items():
        if entries.get(key, want) != want:
            raise fail(f"metadata {key}", entries[key], want)
    cap = entries.get("logit_cap", "0")
    try:
        capped = float(cap) != 0
    except ValueError:
        raise fail("metadata logit_cap", repr(cap), "a number (float)") from None
    if capped:
        raise fail("metadata logit_cap", cap, "0 (capped logits are not supported)")
