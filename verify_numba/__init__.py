"""MLA tree-verify attention for NVIDIA GPUs, in numba.cuda kernels (docs/design.md).

Public names resolve lazily, so that importing this package loads neither numba nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verify_numba.batch import MaskLayout, Parts, VerifyBatch
    from verify_numba.errors import VerifyInputError
    from verify_numba.plan import VerifyPlan, make_plan
    from verify_numba.validate import check_values
    from verify_numba.verifier import Verifier

_HOMES = {
    "MaskLayout": "batch", "Parts": "batch", "VerifyBatch": "batch", "VerifyInputError": "errors",
    "VerifyPlan": "plan", "make_plan": "plan", "check_values": "validate", "Verifier": "verifier",
}  # fmt: skip
__all__ = [
    "MaskLayout", "Parts", "Verifier", "VerifyBatch", "VerifyInputError", "VerifyPlan", "check_values", "make_plan",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'verify_numba' has no attribute {name!r}")
    return getattr(importlib.import_module(f"verify_numba.{_HOMES[name]}"), name)
