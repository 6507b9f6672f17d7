"""Keeping the KV pool's slots contiguous: run metric, sorted allocation, live relocation.

Tier 0 (``sort``) hands out slots in contiguous windows; tier 1 (``relocate``) moves live rows as well.
Everything here is free of SGLang, except the files whose names begin with ``sglang_``: ``sglang_allocator``,
``sglang_state``, ``sglang_transaction`` and ``sglang_hooks``; they alone import it, and only inside functions.
"""
