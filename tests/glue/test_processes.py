"""The plug-in in real processes of the installed SGLang: spawned ones have the hook, off leaves no trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sglang_glue.status import RUN_VARIABLE, read_statuses

pytest.importorskip("sglang")
pytestmark = pytest.mark.sglang

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "sglang_glue" / "sitecustomize"

SCRIPT = """
    import json, multiprocessing, sys

    def state(loader):
        if loader:
            from sglang.srt.plugins import load_plugins
            load_plugins()
        from sglang.srt.layers.attention import triton_backend
        from sglang.srt.plugins.hook_registry import HookRegistry
        init, depth = triton_backend.TritonAttnBackend.__init__, 0
        while hasattr(init, "__wrapped__"):
            init, depth = init.__wrapped__, depth + 1
        ours = sorted(m for m in sys.modules if m.startswith("sglang_glue."))
        hooks = [t for t in HookRegistry._hooks if "TritonAttnBackend" in t]
        return {"wraps": depth, "modules": ours, "hooks": hooks, "finders": len(sys.meta_path)}

    def child(loader, pipe):
        pipe.send(state(loader))

    if __name__ == "__main__":
        loader = sys.argv[1] == "loader"
        found = {"parent": state(loader)}
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=child, args=(loader, there))
        process.start()
        found["child"] = here.recv()
        process.join()
        print("FOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def distribution(tmp_path_factory) -> Path:
    """The entry point as an installed package would show it, without installing anything."""
    folder = tmp_path_factory.mktemp("dist")
    info = folder / "verify_numba_for_test-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: verify-numba-for-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nverify_numba = sglang_glue.plugin:register\n")
    return folder


def run(tmp_path, paths, loader, **env):
    script = tmp_path / "run_it.py"
    script.write_text(textwrap.dedent(SCRIPT))
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KDTREE_") and k != RUN_VARIABLE}
    path = os.pathsep.join([*map(str, paths), str(ROOT), clean.pop("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(script), loader],
        env={**clean, "PYTHONPATH": path, "SGLANG_PLUGINS": "verify_numba", **env},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def found(ran):
    assert ran.returncode == 0, ran.stderr
    (line,) = [x for x in ran.stdout.splitlines() if x.startswith("FOUND")]
    return json.loads(line[5:])


def test_a_spawned_process_has_the_hook_and_says_so(tmp_path, distribution):
    ran = run(tmp_path, [distribution], "loader", KDTREE_VERIFY="on", KDTREE_STATUS=str(tmp_path / "status"))
    for state in found(ran).values():
        assert state["wraps"] == 1 and len(state["hooks"]) == 1
    statuses = list(read_statuses(tmp_path / "status"))
    assert len(statuses) == 2 and len({s.run for s in statuses}) == 1
    assert {s.content["mode"] for s in statuses} == {"on"} and not any(s.alive for s in statuses)


def test_off_leaves_no_trace(tmp_path, distribution):
    with_us = found(run(tmp_path, [distribution], "loader", KDTREE_STATUS=str(tmp_path / "status")))
    without = found(run(tmp_path, [], "loader", SGLANG_PLUGINS="none"))  # a checkout may hold our entry point too
    for who in ("parent", "child"):
        assert with_us[who] | {"modules": []} == without[who]
        assert with_us[who]["modules"] == ["sglang_glue.plugin", "sglang_glue.settings"]
        assert with_us[who]["wraps"] == 0 and not with_us[who]["hooks"]
    assert not (tmp_path / "status").exists()


@pytest.mark.parametrize("env", [{"KDTREE_VERIFY": "yes"}, {"KDTREE_VERFIY": "on"}])
def test_a_bad_setting_ends_the_start(tmp_path, distribution, env):
    ran = run(tmp_path, [distribution], "loader", **env)
    assert ran.returncode == 1
    assert "off, validate, on" in ran.stderr or "KDTREE_VERFIY is not a setting" in ran.stderr
    assert "FOUND" not in ran.stdout


def test_sitecustomize_hooks_spawned_processes_without_a_loader(tmp_path):
    ran = run(tmp_path, [SITE], "none", KDTREE_VERIFY="validate", KDTREE_STATUS=str(tmp_path / "status"))
    for state in found(ran).values():
        assert state["wraps"] == 1 and not state["hooks"]
    assert len(list(read_statuses(tmp_path / "status"))) == 2


def test_both_ways_at_once_hook_once(tmp_path, distribution):
    ran = run(tmp_path, [SITE, distribution], "loader", KDTREE_VERIFY="on", KDTREE_STATUS=str(tmp_path / "status"))
    assert {state["wraps"] for state in found(ran).values()} == {1}


def test_sitecustomize_is_inert_when_off_and_runs_the_one_it_hides(tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys; sys.hidden_ran = True\n")
    code = "import sys; print(sys.hidden_ran, [f for f in sys.meta_path if 'glue' in type(f).__module__])"
    env = {**os.environ, "PYTHONPATH": f"{SITE}{os.pathsep}{hidden}", "KDTREE_VERIFY": "off"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert ran.stdout.strip() == "True []", ran.stderr
