"""JSON results: strict JSON (no NaN, no Infinity), written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from harness.errors import UsageError

STDOUT = "-"


def check_target(target: str) -> None:
    """Refuse a target that cannot be written, before hours of work rather than after. Raises UsageError."""
    if target == STDOUT:
        return
    path = Path(target)
    if path.is_dir():
        raise UsageError(f"--json {target}: is a folder, expected a file")
    if not path.parent.is_dir():
        raise UsageError(f"--json {target}: the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"--json {target}: the folder {path.parent} is not writable")


def write_json(value: dict[str, Any], target: str) -> None:
    """Write `value` to a file or, for '-', to stdout. Numbers that are not finite become null."""
    text = json.dumps(finite(value), indent=2, allow_nan=False) + "\n"
    if target == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    path = Path(target)
    if path.exists() and not path.is_file():  # a pipe or a device: nothing to replace
        path.write_text(text)
        return
    path = path.resolve()  # a link stays a link
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text)
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def finite(value: Any) -> Any:
    """The same structure with NaN and infinities as None: JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
