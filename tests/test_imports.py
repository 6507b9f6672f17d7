"""The import arrows of docs/design.md, read from the sources, and what an import of the core loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("verify_numba", "oracle", "captured_tensors", "harness", "sglang_glue")
ARROWS = {
    "verify_numba": (),
    "oracle": ("verify_numba.dims",),
    "captured_tensors": ("verify_numba.dims",),
    "harness": ("verify_numba", "oracle", "captured_tensors", "sglang_glue"),
    "sglang_glue": ("verify_numba", "captured_tensors"),
}
"""What each package may import of the others."""
NUMBA = ("verify_numba/ptx/", "verify_numba/gpu/compile.py", "verify_numba/variants.py", "sglang_glue/defrag/mover.py",
         "harness/")  # fmt: skip
TORCH = ("verify_numba/arrays.py", "verify_numba/executor_gpu.py", "verify_numba/verifier.py", "sglang_glue/",
         "harness/")  # fmt: skip
SGLANG = ("sglang_glue/backend.py", "sglang_glue/plugin.py", "sglang_glue/defrag/sglang_", "harness/")
"""Files and folders that may name a library; in others not even inside a function."""


def imports(path: Path) -> Iterator[str]:
    """Dotted names of all modules that a file imports, at its top or inside a function; `a.b` for `from a import b`."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


ALL = [path for package in PACKAGES for path in sources(package)]


def offenders(library: str, homes: tuple[str, ...]) -> set[str]:
    """Files outside `homes` that import a library."""
    using = {str(path.relative_to(ROOT)) for path in ALL if any(within(name, library) for name in imports(path))}
    assert any(name.startswith(homes) for name in using), f"nobody imports {library}: the test looks in the wrong place"
    return {name for name in using if not name.startswith(homes)}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_follow_the_arrows(package):
    assert sources(package)
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources(package)
        for name in imports(path)
        for other in ({*PACKAGES, "tests"} - {package})
        if within(name, other) and not any(within(name, allowed) for allowed in ARROWS[package])
    ]
    assert not wrong


@pytest.mark.parametrize(("library", "homes"), [("numba", NUMBA), ("torch", TORCH), ("sglang", SGLANG)])
def test_libraries_are_named_in_few_files(library, homes):
    assert not offenders(library, homes)


@pytest.mark.parametrize("module", ["pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"])
def test_nothing_unpickles(module):
    assert not [str(path) for path in ALL if any(within(name, module) for name in imports(path))]


def test_the_alphabet_imports_nothing():
    assert list(imports(ROOT / "verify_numba/dims.py")) == []


def loaded_by(statement: str) -> set[str]:
    """The top-level modules in a new interpreter after a statement."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import verify_numba",
        "import verify_numba; [getattr(verify_numba, name) for name in verify_numba.__all__]",
        "from verify_numba import make_plan; make_plan(max_bs=1, T=9, H=8, cc=(9, 0), sm_count=132)",
        "from verify_numba import Verifier; Verifier(max_bs=1, T=1, H=1, device='cpu').warmup()",
        "import verify_numba.variants; verify_numba.variants.all_specs()",
        "import verify_numba.gpu.kernel_set",
        "import oracle",
        "import captured_tensors",
    ],
)
def test_the_core_loads_neither_numba_nor_torch(statement):
    assert not {"numba", "torch", "llvmlite", "cuda", "sglang"} & loaded_by(statement)


def test_import_alone_loads_only_the_package():
    assert not {"numpy", "ml_dtypes", "greenlet"} & loaded_by("import verify_numba")


def test_an_unknown_name_is_an_attribute_error():
    import verify_numba

    with pytest.raises(AttributeError, match="has no attribute 'verify'"):
        _ = verify_numba.verify
    assert set(verify_numba.__all__) == set(verify_numba._HOMES)
