"""Verify attention in float64 NumPy: the answer that kernels are held to, and how far they may be from it."""

from oracle.attention import attention, merge, prefix, tail
from oracle.batch import Batch, BatchLike, Request, requests, tree_mask, verify_batch
from oracle.bf16_reference import bf16_verify_batch, round_bf16
from oracle.budget import BudgetUse, ErrorBudget, error_budget, half_ulp

__all__ = [
    "Batch",
    "BatchLike",
    "BudgetUse",
    "ErrorBudget",
    "Request",
    "attention",
    "bf16_verify_batch",
    "error_budget",
    "half_ulp",
    "merge",
    "prefix",
    "requests",
    "round_bf16",
    "tail",
    "tree_mask",
    "verify_batch",
]
