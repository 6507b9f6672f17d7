"""Patch `TritonAttnBackend.__init__` when its module is imported: for SGLang releases without a plug-in loader."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

MODULE = "sglang.srt.layers.attention.triton_backend"


def install() -> None:
    """Watch for the module, unless the mode is off; called by `sitecustomize` in every Python process."""
    if os.environ.get("KDTREE_VERIFY", "off") in ("", "off"):
        return
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as Python would, and patches it once it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        patch(module.TritonAttnBackend)


def patch(cls: type) -> None:
    """Call our hook after `cls.__init__`, unless this process is hooked already."""
    from sglang_glue.plugin import checked_settings, hook_for

    hook = hook_for(checked_settings())
    if hook is None:
        return
    original = cls.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        hook(None, self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[misc]
