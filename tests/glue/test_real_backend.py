"""SGLang's own `forward_extend`, pool, layer and batch on the CPU, with our function in the slot."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang.srt")

from sglang.srt.layers.attention.triton_backend import (
    ForwardMetadata,
    TritonAttnBackend,
)
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel

from sglang_glue import backend as sgl
from sglang_glue.settings import Mode
from tests.glue.fakes import SLOTS, SM_SCALE, FakeVerifier, attend, make_call
from tests.glue.slots import make_slot

pytestmark = pytest.mark.sglang

H, T, LAYERS = 2, 4, 3


@pytest.fixture(autouse=True)
def one_rank():
    """What a server's start publishes and `set_kv_buffer` asks for."""
    with get_parallel().override(dcp_enabled=False):
        yield


def mla_pool(dtype=torch.bfloat16, start_layer=None):
    return MLATokenToKVPool(
        size=SLOTS - 1, page_size=1, dtype=dtype, kv_lora_rank=512, qk_rope_head_dim=64, layer_num=LAYERS,
        device="cpu", enable_memory_saver=False, start_layer=start_layer,
    )  # fmt: skip


def mla_layer(layer_id: int) -> RadixAttention:
    return RadixAttention(H, 576, SM_SCALE, num_kv_heads=1, layer_id=layer_id, v_head_dim=512)


def real_backend(pool, extend=None):
    """A `TritonAttnBackend` with what `forward_extend` reads; its own `__init__` asks for a GPU."""
    backend = TritonAttnBackend.__new__(TritonAttnBackend)
    backend.token_to_kv_pool = pool
    backend.req_to_token_pool = ReqToTokenPool(size=8, max_context_len=32, device="cpu", enable_memory_saver=False)
    backend.allow_bidirectional_attention_in_extend = False
    backend.enable_deterministic = False
    backend.use_mla = True
    backend.dcp_size = 1
    backend.page_size = 1
    backend.num_draft_tokens = T
    backend.num_head = H
    backend.use_verify_splitkv = backend.use_verify_shared_kv = False
    backend.verify_splitkv_fwd = backend.verify_shared_kv_fwd = None
    backend.use_dense_fp8_chunked_prefill = False
    backend._translate_kv_loc = None
    backend.dllm_attention = None
    backend.extend_attention_fwd = extend or refuse
    return backend


def refuse(*args, **kwargs):
    raise AssertionError("Triton was called")


def runner(backend, **changes):
    defaults = {
        "token_to_kv_pool": backend.token_to_kv_pool, "req_to_token_pool": backend.req_to_token_pool,
        "is_draft_worker": False, "page_size": 1, "device": "cpu", "gpu_id": 0, "tp_rank": 1, "pp_rank": 0,
        "pp_size": 1, "tp_size": 1,
        "spec_algorithm": SimpleNamespace(name="NGRAM"),
    }  # fmt: skip
    return SimpleNamespace(**{**defaults, **changes})


def metadata(call, mask=True):
    fields = dict.fromkeys(ForwardMetadata.__dataclass_fields__)
    fields |= {
        "max_extend_len": T, "kv_indptr": call.kv_indptr, "kv_indices": call.kv_indices, "qo_indptr": call.qo_indptr,
        "custom_mask": call.custom_mask, "mask_indptr": call.mask_indptr,
    }  # fmt: skip
    return ForwardMetadata(**fields)


def step(backend, layer_id=0, mode=ForwardMode.TARGET_VERIFY, seed=0, **call_options):
    """One verify step of one layer through SGLang; returns the call as we expect it, and SGLang's output."""
    call = make_call(seed=seed, T=T, H=H, **call_options)
    pool = backend.token_to_kv_pool
    buffer = pool.get_key_buffer(layer_id)
    buffer[:] = call.k_buffer.to(buffer.dtype)
    free = sorted(set(range(1, SLOTS)) - set(call.kv_indices.tolist()))
    loc = torch.tensor(free[: call.q.shape[0]])
    backend.forward_metadata = metadata(call)
    batch = ForwardBatch.__new__(ForwardBatch)
    batch.__dict__.update(
        forward_mode=mode, out_cache_loc=loc, batch_size=call.bs, mha_one_shot=False,
        positions=torch.arange(call.q.shape[0]), req_pool_indices=torch.arange(call.bs) + 1,
        attn_attend_prefix_cache=None, extend_seq_lens_cpu=None,
    )  # fmt: skip
    out = backend.forward_extend(call.q.flatten(1), call.k, call.v, mla_layer(layer_id), batch)
    assert torch.equal(buffer[loc].float(), call.k.to(buffer.dtype).float())  # the draft rows are in the pool
    return call._replace(k_buffer=buffer), out


def serve(backend, mode=Mode.ON, verifier=None, **more):
    """Enter the slot of `backend` as the installer does."""
    facts = sgl.facts_of(backend, runner(backend))
    slot = make_slot(
        mode, calls=[], verifier=verifier or FakeVerifier(), triton=sgl.triton_of(backend),
        occupant=sgl.own_occupant(backend), **more,
    )  # fmt: skip
    slot.rows = {address: row for row, address in enumerate(facts.layer_of)}
    slot.board.__init__(len(facts.layer_of) + 1, "cpu")
    slot.counters.layers[:] = facts.layer_of.values()
    sgl.enter_slot(backend, slot)
    return slot


@pytest.mark.parametrize("layer_id", range(LAYERS))
@pytest.mark.parametrize("tree", [True, False])
def test_a_verify_step_is_ours_and_right(layer_id, tree):
    backend = real_backend(mla_pool())
    slot = serve(backend)
    call, out = step(backend, layer_id, tree=tree)
    want = torch.empty(call.o.shape, dtype=torch.bfloat16)
    attend(call, want)
    assert torch.equal(out, want.flatten(1))
    assert slot.counters.snapshot()["eager_calls"] == 1 and slot.counters.snapshot()["errors"] == {}


def test_the_layer_is_told_from_its_buffer():
    backend = real_backend(mla_pool(start_layer=30))
    slot = serve(backend)
    for layer_id in (30, 31, 32):
        step(backend, layer_id)
    assert slot.counters.layers == [30, 31, 32]
    assert slot.counters.snapshot()["steps"]["eager"] == 1 and slot.counters.snapshot()["eager_calls"] == 3


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND_V2])
def test_other_steps_never_reach_us(mode):
    served = []
    backend = real_backend(mla_pool(), extend=lambda *args, **kwargs: served.append(args))
    slot = serve(backend)
    step(backend, mode=mode)
    assert len(served) == 1 and not slot.verifier.batches


def test_validate_gives_triton_sglangs_own_arguments():
    seen = []

    def triton(*args, **kwargs):
        seen.append((args, kwargs))
        attend(sgl.SlotCall(*args, **{k: v for k, v in kwargs.items() if k in sgl.SlotCall._fields}), args[3])

    ours, theirs = real_backend(mla_pool(), extend=triton), real_backend(mla_pool(), extend=triton)
    serve(ours, Mode.VALIDATE, FakeVerifier(offset=1.0))
    _, validated = step(ours)
    _, plain = step(theirs)
    assert torch.equal(validated, plain)
    (args, kwargs), (plain_args, plain_kwargs) = seen
    for mine, sglangs in zip(args, plain_args, strict=True):
        same = torch.equal(mine, sglangs) if isinstance(mine, torch.Tensor) and mine is not args[3] else True
        assert same and type(mine) is type(sglangs)
    differing = {k: v for k, v in plain_kwargs.items() if k not in kwargs}
    # What SGLang passes on top says "nothing special" for every backend that we take.
    assert all(value is None for name, value in differing.items() if name != "page_size")
    assert differing.get("page_size", 1) == 1


def test_a_step_that_is_not_ours_goes_to_triton_untouched():
    seen = []
    backend = real_backend(mla_pool(torch.float8_e4m3fn), extend=lambda *args, **kw: seen.append(args))
    slot = serve(backend)
    step(backend)
    assert len(seen) == 1 and not slot.verifier.batches
    assert slot.counters.snapshot()["declines"]["eager"] == {"kv_dtype": 1}


def test_our_error_leaves_the_step_to_triton():
    seen = []
    backend = real_backend(mla_pool(), extend=lambda *args, **kw: seen.append(args))
    slot = serve(backend, verifier=FakeVerifier(error=RuntimeError("kernel")))
    step(backend)
    assert len(seen) == 1 and slot.counters.snapshot()["errors"] == {"RuntimeError": 1}


def test_facts_of_a_real_backend():
    backend = real_backend(mla_pool())
    facts = sgl.facts_of(backend, runner(backend))
    assert facts.is_target and facts.use_mla and list(facts.layer_of.values()) == [0, 1, 2]
    assert (facts.max_bs, facts.T, facts.H, facts.pool_slots) == (8, T, H, SLOTS)
    assert (facts.algorithm, facts.rank, facts.device, facts.model) == ("ngram", "tp1", "cpu", "unknown")


def test_the_model_is_named_by_its_config():
    backend = real_backend(mla_pool())
    config = SimpleNamespace(architectures=["DeepseekV3ForCausalLM"], num_hidden_layers=61)
    named = runner(backend, model_config=SimpleNamespace(hf_config=config))
    assert sgl.facts_of(backend, named).model == "DeepseekV3ForCausalLM, 61 layers"


@pytest.mark.parametrize("change", [{"is_draft_worker": True}, {"skip_prefill": True}])
def test_draft_backends_are_not_targets(change):
    backend = real_backend(mla_pool())
    skip = change.pop("skip_prefill", False)
    assert not sgl.facts_of(backend, runner(backend, **change), skip).is_target


def test_a_stage_of_a_pipeline_names_itself():
    backend = real_backend(mla_pool())
    assert sgl.facts_of(backend, runner(backend, pp_size=2, pp_rank=1)).rank == "tp1-pp1"


def test_a_release_without_the_slot_is_entered_at_its_extend_kernel():
    class Old(TritonAttnBackend):
        def forward_extend(self, call):  # the call that 0.5.10 makes for every extend and verify step
            self.extend_attention_fwd(
                *call[:16], logit_cap=0.0, sliding_window_size=-1, sinks=None, window_kv_offsets=None,
                xai_temperature_len=-1,
            )  # fmt: skip

    backend = real_backend(mla_pool())
    backend.__class__ = Old
    served = []
    backend.extend_attention_fwd = lambda *args, **kw: served.append(args)
    assert not sgl.has_slot(backend)
    slot = serve(backend)
    backend.forward_extend(make_call(T=T, H=H))
    assert len(slot.verifier.batches) == 1 and not served
    backend.forward_extend(make_call(T=T, H=H, tree=False))  # nothing tells this from a prefill
    assert len(slot.verifier.batches) == 1 and len(served) == 1
