"""What the patches rest on (sglang_glue/PATCHES.md), read from the sources of each SGLang release at hand.

The installed package is one; unpacked wheels of others may be named, colon-separated, in VERIFY_NUMBA_TEST_SGLANG (the
folders that hold `sglang/`). Nothing is imported, so any release can be read on any machine.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from pathlib import Path

import pytest

from sglang_glue.backend import FIRST_RELEASE_WITH_SLOT, SlotCall

BACKEND = "srt/layers/attention/triton_backend.py"
SLOT_ARGUMENTS = [
    "q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)",
    "k.contiguous()",
    "v.contiguous()",
    "o.view(-1, layer.tp_q_head_num, layer.v_head_dim)",
    "self.token_to_kv_pool.get_key_buffer(layer.layer_id)",
    "self.token_to_kv_pool.get_value_buffer(layer.layer_id)",
    "self.forward_metadata.qo_indptr",
    "kv_indptr",
    "kv_indices",
    "self.forward_metadata.custom_mask",
    "causal",
    "self.forward_metadata.mask_indptr",
    "self.forward_metadata.max_extend_len",
    "k_descale",
    "v_descale",
    "layer.scaling",
]
EXTEND_KEYWORDS = {"logit_cap", "sliding_window_size", "sinks", "window_kv_offsets", "xai_temperature_len"}


def releases() -> list[Path]:
    spec = importlib.util.find_spec("sglang")
    installed = [Path(spec.submodule_search_locations[0])] if spec and spec.submodule_search_locations else []
    unpacked = [Path(p) / "sglang" for p in os.environ.get("VERIFY_NUMBA_TEST_SGLANG", "").split(":") if p]
    return [*installed, *unpacked]


def version_of(root: Path) -> str:
    return re.findall(r"version = '([0-9.a-z]+)'", (root / "_version.py").read_text())[0]


RELEASES = releases()
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not RELEASES, reason="no SGLang is installed and VERIFY_NUMBA_TEST_SGLANG names no sources"),
]


@pytest.fixture(params=RELEASES or [None], ids=lambda root: str(root))
def root(request) -> Path:
    return request.param


def methods(root: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((root / BACKEND).read_text())
    (cls,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "TritonAttnBackend")
    return {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}


def with_slot(root: Path) -> bool:
    def key(version: str) -> list[int]:
        return [int(part) for part in version.split(".")[:3]]

    return key(version_of(root)) >= key(FIRST_RELEASE_WITH_SLOT)


def assigned(method: ast.FunctionDef) -> set[str]:
    return {n.attr for n in ast.walk(method) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}


def calls_of(method: ast.FunctionDef, name: str) -> list[ast.Call]:
    calls = [n for n in ast.walk(method) if isinstance(n, ast.Call)]
    return [c for c in calls if ast.unparse(c.func).split(".")[-1] == name]


def test_init_takes_what_the_hook_is_called_with(root):
    init = methods(root)["__init__"]
    assert [a.arg for a in init.args.args[:3]] == ["self", "model_runner", "skip_prefill"]


def test_init_sets_what_we_read(root):
    names = assigned(methods(root)["__init__"])
    assert {
        "num_draft_tokens",
        "num_head",
        "enable_deterministic",
        "extend_attention_fwd",
        "forward_metadata",
    } <= names


def test_forward_extend_takes_the_batch_fifth(root):
    names = [a.arg for a in methods(root)["forward_extend"].args.args]
    assert names[:6] == ["self", "q", "k", "v", "layer", "forward_batch"]


def test_the_slot_is_asked_with_our_arguments_in_a_verify_step(root):
    forward = methods(root)["forward_extend"]
    slots = calls_of(forward, "verify_splitkv_fwd") + calls_of(forward, "verify_fwd")
    if not with_slot(root):
        assert not slots
        return
    (slot,) = slots
    assert [ast.unparse(a) for a in slot.args] == SLOT_ARGUMENTS
    assert {k.arg for k in slot.keywords} == EXTEND_KEYWORDS | {"max_bs"} <= set(SlotCall._fields)
    condition = next(
        ast.unparse(n.test) for n in ast.walk(forward) if isinstance(n, ast.If) and slot in ast.walk(n.test)
    )
    assert "forward_batch.forward_mode.is_target_verify()" in condition
    if "score_mod" in [a.arg for a in forward.args.args]:
        assert "score_mod is None" in condition


def test_the_slots_flags_are_instance_attributes(root):
    names = assigned(methods(root)["__init__"])
    flags = {name for name in ("use_verify_splitkv", "verify_splitkv_fwd") if name in names}
    assert len(flags) == (2 if with_slot(root) else 0)
    forward = methods(root)["forward_extend"]
    asked = {n.attr for n in ast.walk(forward) if isinstance(n, ast.Attribute) and n.attr.startswith("use_verify_")}
    # Any further flag would be asked beside ours, and own_occupant would not know it.
    assert asked <= {"use_verify_splitkv", "use_verify_shared_kv"}


def test_the_extend_kernel_takes_the_slots_arguments(root):
    forward = methods(root)["forward_extend"]
    call = (calls_of(forward, "extend_attention_fwd") + calls_of(forward, "_forward_extend_kernel"))[0]
    positional = [ast.unparse(a) for a in call.args if ast.unparse(a) != "layer"]
    assert [p.replace("forward_batch.token", "self.token").split(" if ")[0] for p in positional] == SLOT_ARGUMENTS
    given = {k.arg for k in call.keywords}
    assert given >= EXTEND_KEYWORDS
    # What SGLang gives on top must be nothing for the backends that we take; read it before widening this.
    assert given - EXTEND_KEYWORDS <= {"page_size", "score_mod", "aux_tensors", "extend_seq_lens_cpu"}
    if not with_slot(root):
        assert given == EXTEND_KEYWORDS
