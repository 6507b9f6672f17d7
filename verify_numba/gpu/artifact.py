"""A compiled kernel variant, and its form on disk.

File: magic, SHA-256 of the rest, length of the header (4 bytes, little endian), header (JSON), PTX
(zlib), cubin. Whatever does not check out reads as `CorruptArtifact`, never as a kernel.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from dataclasses import dataclass

MAGIC = b"verify-numba cubin 1\n"
_DIGEST_BYTES = 32
_LENGTH = struct.Struct("<I")


class CorruptArtifact(ValueError):
    """A cache entry that is truncated, damaged or of another format."""


@dataclass(frozen=True)
class Artifact:
    """A compiled variant.

    name         of the KernelSpec
    entry        symbol of the kernel in the cubin
    arg_format   one `struct` code an argument, in order
    log          what the assembler said (registers, spills)
    ptx, cubin   the code
    """

    name: str
    entry: str
    arg_format: str
    log: str
    ptx: str
    cubin: bytes

    def to_bytes(self) -> bytes:
        ptx = zlib.compress(self.ptx.encode())
        header = {
            "name": self.name,
            "entry": self.entry,
            "arg_format": self.arg_format,
            "log": self.log,
            "ptx_bytes": len(ptx),
            "cubin_bytes": len(self.cubin),
        }
        text = json.dumps(header).encode()
        body = _LENGTH.pack(len(text)) + text + ptx + self.cubin
        return MAGIC + hashlib.sha256(body).digest() + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Artifact:
        """Inverse of `to_bytes`; raises CorruptArtifact with what is wrong."""
        if not data.startswith(MAGIC):
            raise CorruptArtifact("not a cubin cache entry of this format")
        body_at = len(MAGIC) + _DIGEST_BYTES
        body = data[body_at:]
        if hashlib.sha256(body).digest() != data[len(MAGIC) : body_at]:
            raise CorruptArtifact("the checksum does not match: the entry is truncated or damaged")
        try:
            return cls._from_body(body)
        except (struct.error, ValueError, KeyError, TypeError, zlib.error) as error:
            raise CorruptArtifact(f"the entry cannot be read: {error}") from error

    @classmethod
    def _from_body(cls, body: bytes) -> Artifact:
        (header_bytes,) = _LENGTH.unpack_from(body)
        header = json.loads(body[_LENGTH.size : _LENGTH.size + header_bytes])
        ptx_at = _LENGTH.size + header_bytes
        cubin_at = ptx_at + header["ptx_bytes"]
        cubin = body[cubin_at:]
        if len(cubin) != header["cubin_bytes"]:
            raise ValueError(f"{len(cubin)} bytes of cubin, expected {header['cubin_bytes']}")
        ptx = zlib.decompress(body[ptx_at:cubin_at]).decode()
        return cls(header["name"], header["entry"], header["arg_format"], header["log"], ptx, cubin)
