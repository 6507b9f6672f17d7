"""Fat binaries put together by hand, in the layout that nvcc 13 writes."""

from __future__ import annotations

import struct

NOISE = b"\x7fELF some host code " * 3
SASS_90A = bytes.fromhex(
    "0200010140000000107b0000000000000000000000000000080001005a000000"
    "0000000000000000110010000000000000000000000000000000000000000000"
)
SASS_120A = bytes.fromhex(
    "0200010170000000205f0000000000001b5f0000400000000800010078000000"
    "0000000000000000118010010000000000000000000000006"
    "0b3030000000000480000002400000000020901000202010002050500030701010203"
    "000002060100040b08005000000000000000000000"
)
"""Headers of two entries of a released library, byte for byte; `entry` makes others."""


def entry(kind: int, target: int, suffix: str = "", payload: int = 24) -> bytes:
    """Kind 1 is PTX, 2 is SASS."""
    flags = 0x11 | {"": 0, "a": 0x100000, "f": 0x200000}[suffix]
    head = struct.pack("<HHIQIIHHIIIQQQ", kind, 0x101, 64, payload, 0, 0, 8, 1, target, 0, 0, flags, 0, 0)
    return head + b"\0" * payload


def with_payload(header: bytes) -> bytes:
    """A real header followed by as many bytes as it announces."""
    (size,) = struct.unpack_from("<Q", header, 8)
    return header + b"\x55" * size


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
