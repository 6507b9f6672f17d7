"""The dimension alphabet of the whole project (see docs/design.md)."""

D_V = 512
"""Width of a value: the latent (compressed) part of a row."""
D_ROPE = 64
"""Width of the rotary part of a row."""
D_QK = D_V + D_ROPE
"""Width of a key, of a query and of a row of the KV pool."""
ROW_BYTES = 2 * D_QK
"""Bytes of one bf16 row: nine lines of 128 bytes."""
