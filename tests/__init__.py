"""Tests, by layer; ``cases``, ``probe`` and ``strategies`` are shared by all of them."""
