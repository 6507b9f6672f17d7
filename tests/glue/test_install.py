"""SGLang's own `TritonAttnBackend.__init__` on the CPU, hooked through SGLang's own registry."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang.srt")

from sglang.srt.layers.attention import triton_backend as tb
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

import verify_numba
from sglang_glue.backend import TARGET
from sglang_glue.install import Installer
from sglang_glue.settings import Settings
from sglang_glue.slot import VerifySlot
from sglang_glue.status import RUN_VARIABLE, StatusFile, read_statuses
from tests.glue.fakes import FakeVerifier
from tests.glue.test_real_backend import H, T, mla_pool, one_rank, step  # noqa: F401

pytestmark = pytest.mark.sglang


class Unset(SimpleNamespace):
    """A configuration that nobody set: every name is false."""

    def __getattr__(self, name):
        return Unset()

    def __bool__(self):
        return False


@pytest.fixture(autouse=True)
def published(monkeypatch):
    """What a server's start publishes and `__init__` asks for."""
    kernel = Unset(triton_attention_num_kv_splits=8, triton_attention_split_tile_size=None)
    found = {
        "get_spec": Unset(speculative_num_draft_tokens=T, speculative_num_steps=1, speculative_eagle_topk=4),
        "get_exec": Unset(kernel=kernel, dllm=Unset(dllm_algorithm=None)),
        "get_parallel": Unset(attn_dcp_size=1, attn_dcp_rank=0, attn_tp_size=1),
        "get_schedule": Unset(chunked_prefill_size=8192),
    }
    functions = {name: lambda value=value: value for name, value in found.items()}
    functions["get_device_core_count"] = lambda gpu: 8
    for name in ("cuda_graph_fully_disabled", "check_cuda_graph_backend"):
        functions[name] = lambda *args: False
    hybrids = ("mambaish_config", "hybrid_gdn_config", "kimi_linear_config", "linear_attn_model_spec")
    functions |= dict.fromkeys(hybrids, lambda config: None)
    for name, function in functions.items():
        if hasattr(tb, name):  # releases differ in which of them they ask
            monkeypatch.setattr(tb, name, function)


@pytest.fixture
def hooked(tmp_path, monkeypatch):
    """A function that hooks the class with the given settings; undone afterwards."""
    plain = tb.TritonAttnBackend.__init__
    monkeypatch.setenv(RUN_VARIABLE, "test")

    def hook(verifier=None, **env):
        made = []

        def make(**kwargs):
            made.append(kwargs)
            if isinstance(verifier, Exception):
                raise verifier
            return FakeVerifier()

        monkeypatch.setattr(verify_numba, "Verifier", make, raising=False)
        settings = Settings.from_env({"KDTREE_STATUS": str(tmp_path), **env})
        HookRegistry.register(TARGET, Installer(settings, StatusFile(tmp_path, {})).after_init, HookType.AFTER)
        HookRegistry.apply_hooks()
        return made

    yield hook
    HookRegistry.reset()
    tb.TritonAttnBackend.__init__ = plain


def backends(tmp_path):
    (status,) = read_statuses(tmp_path)
    return status.content.get("backends", [])


def model_runner(**changes):
    config = SimpleNamespace(
        attention_arch=tb.AttentionArch.MLA, get_max_num_attention_heads=lambda: H, get_num_kv_heads=lambda *a: 1,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=512, swa_v_head_dim=128,
        context_len=64, hf_config=SimpleNamespace(architectures=[]), is_encoder_decoder=False, head_dim=576,
    )  # fmt: skip
    defaults = {
        "token_to_kv_pool": mla_pool(), "model_config": config, "sliding_window_size": None, "page_size": 1,
        "req_to_token_pool": ReqToTokenPool(size=8, max_context_len=32, device="cpu", enable_memory_saver=False),
        "token_to_kv_pool_allocator": None, "kv_index_translator": None,
        "server_args": Unset(
            triton_attention_num_kv_splits=8,
            triton_attention_split_tile_size=None,
            chunked_prefill_size=8192,
            enable_deterministic_inference=False,
        ),
        "decode_num_tokens_per_req": lambda: T,
        "is_draft_worker": False, "spec_algorithm": SimpleNamespace(name="NGRAM", is_dspark=lambda: False),
        "kv_cache_dtype": torch.bfloat16, "device": "cpu", "gpu_id": 0, "tp_rank": 0, "pp_rank": 0, "pp_size": 1,
        "tp_size": 1,
    }  # fmt: skip
    return SimpleNamespace(**{**defaults, **changes})


def test_a_built_backend_serves_verify_steps_with_us(hooked, tmp_path):
    made = hooked(KDTREE_VERIFY="on", KDTREE_NSPLIT="3", KDTREE_FORM="single")
    backend = tb.TritonAttnBackend(model_runner())
    assert made == [{"max_bs": 8, "T": T, "H": H, "device": "cpu", "nsplit": 3, "form": "single"}]
    assert backend.use_verify_splitkv is True
    assert vars(backend).get("use_verify_shared_kv", False) is False  # not in every release
    step(backend)
    (report,) = backends(tmp_path)
    assert report["rank"] == "tp0" and report["plan"] == "fake plan" and report["entered"] == "verify slot"


def test_the_verifier_is_warm_before_the_slot_is_entered(hooked, monkeypatch):
    order = []
    monkeypatch.setattr(FakeVerifier, "warmup", lambda self: order.append("warmup"))
    monkeypatch.setattr("sglang_glue.backend.enter_slot", lambda *args: order.append("enter"))
    hooked(KDTREE_VERIFY="on")
    tb.TritonAttnBackend(model_runner())
    assert order == ["warmup", "enter"]


def test_capture_writes_a_case_of_a_real_step(hooked, tmp_path):
    from captured_tensors import load_case

    folder = tmp_path / "cases"
    hooked(KDTREE_VERIFY="on", KDTREE_CAPTURE=str(folder), KDTREE_CAPTURE_LAYERS="all", KDTREE_CAPTURE_EVERY="1")
    backend = tb.TritonAttnBackend(model_runner())
    extend = []
    slot = backend.verify_splitkv_fwd
    while not isinstance(slot, VerifySlot):
        slot = slot.__wrapped__
    slot.triton = lambda call, out: extend.append(call) or out.zero_()
    step(backend, layer_id=2)
    deadline = time.monotonic() + 20
    while not list(folder.glob("*.safetensors")):
        assert time.monotonic() < deadline, slot.capture.counts()
        time.sleep(0.02)
    case = load_case(next(folder.glob("*.safetensors")))
    assert case.meta.layer_id == 2 and case.meta.algorithm == "NGRAM" and case.bs == 2 and len(extend) == 1


def unhooked_attributes(**changes):
    backend = tb.TritonAttnBackend(model_runner(**changes))
    return {name: repr(value) for name, value in vars(backend).items() if "verify" in name or "extend" in name}


@pytest.mark.parametrize(("changes", "reason"), [({"page_size": 64}, "page_size"), ({"is_draft_worker": True}, None)])
def test_a_backend_that_is_not_ours_is_left_as_it_was(hooked, tmp_path, changes, reason):
    plain = unhooked_attributes(**changes)
    hooked(KDTREE_VERIFY="on")
    assert {k: v.split(" at ")[0] for k, v in unhooked_attributes(**changes).items()} == {
        k: v.split(" at ")[0] for k, v in plain.items()
    }
    assert [report["declined"] for report in backends(tmp_path)] == ([reason] if reason else [])


def test_a_failing_start_leaves_the_backend_to_triton(hooked, tmp_path, caplog):
    plain = unhooked_attributes()
    hooked(KDTREE_VERIFY="on", verifier=RuntimeError("no such kernel"))
    found = unhooked_attributes()
    assert found["use_verify_splitkv"] == plain["use_verify_splitkv"] == "False"
    assert backends(tmp_path)[0]["declined"] == "RuntimeError: no such kernel"
    assert "Triton serves this backend" in caplog.text


def test_multi_step_draft_backends_are_left_alone(hooked, tmp_path):
    hooked(KDTREE_VERIFY="on")
    backend = tb.TritonAttnBackend(model_runner(), True, torch.zeros(9, dtype=torch.int32))
    assert backend.use_verify_splitkv is False and backends(tmp_path) == []
