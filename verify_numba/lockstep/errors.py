"""What can go wrong in a lockstep launch; each error says which warp of which block did what."""

from __future__ import annotations


class LockstepError(RuntimeError):
    """A kernel broke a rule of the machine it was written for."""


class MemoryFault(LockstepError):
    """An access outside a buffer, across its end, misaligned, or a store to a read-only buffer."""


class ProtocolError(LockstepError):
    """A barrier was used against its rules, or a launch ended with something still under way."""


class DeadlockError(LockstepError):
    """No warp can run and nothing is in flight; the message lists every waiting warp and its barrier."""


class RaceError(LockstepError):
    """Two accesses to the same shared memory, one of them a write, that no barrier keeps in order."""
