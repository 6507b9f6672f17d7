"""Put this folder on PYTHONPATH to hook an SGLang release that has no plug-in loader (docs/serving.md).

Python imports the first `sitecustomize` it finds in every process, spawned ones too; the one that this file hides
is run as well.
"""

import importlib.machinery
import importlib.util
import pathlib
import sys

_HERE = pathlib.Path(__file__).resolve().parent


def _run_hidden() -> None:
    elsewhere = [entry for entry in sys.path if pathlib.Path(entry or ".").resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _hook() -> None:
    if importlib.util.find_spec("sglang_glue") is None:  # used from a checkout, not installed
        sys.path.append(str(_HERE.parents[1]))
    from sglang_glue.importhook import install

    install()


_run_hidden()
_hook()
