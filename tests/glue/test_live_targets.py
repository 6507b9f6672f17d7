"""What the live command and the ranks' agreement rest on, read from the sources of each SGLang release at hand."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from harness.live_accepted import TARGET
from harness.live_engine import engine_options
from harness.live_model import WEIGHTS_TARGET
from tests.glue.test_hook_targets import RELEASES
from tests.glue.test_live_parts import spec

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not RELEASES, reason="no SGLang is installed and VERIFY_NUMBA_TEST_SGLANG names no sources"),
]


@pytest.fixture(params=RELEASES or [None], ids=lambda root: str(root))
def release(request) -> Path:
    if not (request.param / "srt" / "plugins").is_dir():
        pytest.skip("the live command needs a release with a plug-in loader")
    return request.param


@pytest.fixture
def tree(release):
    """A function from a path inside the release to its syntax tree."""
    return lambda path: ast.parse((release / path).read_text())


def names(module: ast.AST) -> set[str]:
    return {n.name for n in ast.walk(module) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}


def test_the_engine_takes_our_arguments(release, tree):
    # Newer releases assemble the class from the files of one folder.
    files = [release / "srt/server_args.py", *(release / "srt/arg_groups/fields").glob("*.py")]
    fields = {
        n.target.id
        for path in files
        for n in ast.walk(tree(path))
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    for one in (spec("--tp", "2"), spec("--algorithm", "eagle")):
        assert set(engine_options(one, "model")) <= fields


def test_verify_sampling_returns_predictions_lengths_and_places(tree):
    module, _, function = TARGET.removeprefix("sglang.").rpartition(".")
    (sample,) = (
        n for n in tree(f"{module.replace('.', '/')}.py").body if isinstance(n, ast.FunctionDef) and n.name == function
    )
    returned = [ast.unparse(n.value) for n in ast.walk(sample) if isinstance(n, ast.Return) and n.value]
    assert all(r.startswith("(predict, ") and r.endswith(", accept_index)") for r in returned), returned


def test_dummy_weights_are_made_where_we_replace_them(tree):
    module, _, function = WEIGHTS_TARGET.removeprefix("sglang.").rpartition(".")
    loader = tree(f"{module.replace('.', '/')}.py")
    imported = {alias.name for n in ast.walk(loader) if isinstance(n, ast.ImportFrom) for alias in n.names}
    assert function in imported


def test_ranks_find_one_another_and_their_numbers(tree):
    state = tree("srt/distributed/parallel_state.py")
    assert "get_tp_group" in names(state) | {
        t.id for n in state.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)
    }
    assert "self.cpu_group = cpu_group" in ast.unparse(state)
    context = tree("srt/runtime_context.py")
    strings = {n.value for n in ast.walk(context) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    assert {"tp_rank", "tp_size", "pp_rank", "pp_size"} <= names(context) | strings


def test_the_engine_streams_and_flushes(tree):
    engine = names(tree("srt/entrypoints/engine.py"))
    assert {"generate", "flush_cache", "shutdown"} <= engine
