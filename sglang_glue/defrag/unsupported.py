"""What cannot be handled is refused by its name."""

from __future__ import annotations


class Unsupported(Exception):
    """A part of the server that defragmentation does not know; the message names it."""


def type_name(value: object) -> str:
    """The full dotted name of a value's own type."""
    return f"{type(value).__module__}.{type(value).__qualname__}"
