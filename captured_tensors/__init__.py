"""Verify steps captured from a live SGLang: the cases, their schema and their store."""

from captured_tensors.case import CaptureCase
from captured_tensors.manifest import DEFAULT_CASES, Manifest, ManifestEntry, read_manifest
from captured_tensors.meta import CaptureMeta
from captured_tensors.pool import ScatteredPool, scatter_pool
from captured_tensors.schema import MASK_LAYOUTS, CaptureError
from captured_tensors.store import iter_case_paths, load_case, load_manifest, save_case

__all__ = [
    "DEFAULT_CASES",
    "MASK_LAYOUTS",
    "CaptureCase",
    "CaptureError",
    "CaptureMeta",
    "Manifest",
    "ManifestEntry",
    "ScatteredPool",
    "iter_case_paths",
    "load_case",
    "load_manifest",
    "read_manifest",
    "save_case",
    "scatter_pool",
]
