"""Characters that a terminal can show."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console


@dataclass(frozen=True)
class Glyphs:
    """Cells of a drawn mask."""

    seen: str
    hidden: str


UNICODE = Glyphs(seen="■", hidden="·")
ASCII = Glyphs(seen="#", hidden=".")


def glyphs_for(console: Console) -> Glyphs:
    """Plain ASCII where the output's encoding knows no more."""
    return UNICODE if console.encoding.lower().startswith("utf") else ASCII
