"""Errors that end a command with one line on stderr instead of a traceback."""

from __future__ import annotations


class UsageError(Exception):
    """The command cannot do what was asked; the message says what was found and what was expected."""
