"""A cubin cache entry is read back whole or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify_numba.gpu.artifact import MAGIC, Artifact, CorruptArtifact

ARTIFACT = Artifact("some", "_Zsome", "qif", "Used 8 registers", "// PTX\n" * 20, bytes(range(256)) * 4)
DATA = ARTIFACT.to_bytes()


@given(st.builds(Artifact, st.text(), st.text(), st.text(), st.text(), st.text(), st.binary(max_size=2000)))
def test_bytes_and_back(artifact):
    assert Artifact.from_bytes(artifact.to_bytes()) == artifact


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_any_changed_byte_is_noticed(position, change):
    damaged = bytearray(DATA)
    damaged[position] ^= change
    with pytest.raises(CorruptArtifact):
        Artifact.from_bytes(bytes(damaged))


@given(st.integers(0, len(DATA) - 1))
def test_any_truncation_is_noticed(length):
    with pytest.raises(CorruptArtifact):
        Artifact.from_bytes(DATA[:length])


def test_an_appended_byte_is_noticed():
    with pytest.raises(CorruptArtifact, match="checksum"):
        Artifact.from_bytes(DATA + b"\0")


def test_a_foreign_file_is_named_as_such():
    with pytest.raises(CorruptArtifact, match="not a cubin cache entry"):
        Artifact.from_bytes(b"\x7fELF" + DATA)


def test_a_right_checksum_over_nonsense_is_still_refused():
    import hashlib

    body = b"\xff\xff\x00\x00 not a header"
    with pytest.raises(CorruptArtifact, match="cannot be read"):
        Artifact.from_bytes(MAGIC + hashlib.sha256(body).digest() + body)
