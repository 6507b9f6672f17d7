"""The one file that knows SGLang's types: what a backend is, what its verify slot is called with, how to enter it.

Read against SGLang 0.5.10, 0.5.14, 0.5.17 and 0.5.23; PATCHES.md lists what is changed and why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from verify_numba.dims import D_QK

TARGET = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend.__init__"
FIRST_RELEASE_WITH_SLOT = "0.5.14"


class SlotCall(NamedTuple):
    """The arguments of the verify slot, in SGLang's order (those of `extend_attention_fwd`).

    N = bs * max_extend_len draft tokens; shapes as in docs/design.md.
    """

    q: Any  # [N, H, D_QK] bf16
    k: Any  # [N, 1, D_QK] bf16, the draft tokens' latents
    v: Any  # [N, 1, D_V] bf16, the first columns of k
    o: Any  # [N, H, D_V] bf16, to be written
    k_buffer: Any  # [slots, 1, D_QK], this layer's pool
    v_buffer: Any  # [slots, 1, D_V], a view of k_buffer
    qo_indptr: Any  # [bs + 1]
    kv_indptr: Any  # [bs + 1], prefix only
    kv_indices: Any  # [>= kv_indptr[bs]]
    custom_mask: Any  # flat, or None for a causal chain
    causal: bool
    mask_indptr: Any  # [bs + 1]
    max_extend_len: int
    k_descale: float
    v_descale: float
    sm_scale: float
    logit_cap: float = 0.0
    sliding_window_size: int = -1
    sinks: Any = None
    window_kv_offsets: Any = None
    xai_temperature_len: int = -1
    max_bs: int | None = None

    @property
    def bs(self) -> int:
        return int(self.qo_indptr.shape[0]) - 1


@dataclass(frozen=True)
class BackendFacts:
    """What one attention backend is, in plain values, for eligibility and for sizing the verifier."""

    is_target: bool  # it verifies: not a draft model's backend, and speculation is on
    use_mla: bool
    page_size: int
    deterministic: bool
    dcp_size: int
    device: str
    max_bs: int
    T: int
    H: int
    layer_of: dict[int, int]  # address of a layer's key buffer -> layer number; empty: not an MLA pool
    pool_slots: int
    algorithm: str
    rank: str
    tp_size: int
    model: str  # architecture, layers


def facts_of(backend: Any, model_runner: Any, skip_prefill: bool = False) -> BackendFacts:
    """Read a `TritonAttnBackend` and the `ModelRunner` that it was built from."""
    pool = model_runner.token_to_kv_pool
    layers = _layers_of(pool)
    draft_tokens = getattr(backend, "num_draft_tokens", None) or 0
    return BackendFacts(
        is_target=bool(draft_tokens) and not skip_prefill and not model_runner.is_draft_worker,
        use_mla=bool(getattr(backend, "use_mla", layers)),
        page_size=int(getattr(model_runner, "page_size", None) or 1),
        deterministic=bool(getattr(backend, "enable_deterministic", False)),
        dcp_size=int(getattr(backend, "dcp_size", 1)),
        device=_device(model_runner),
        max_bs=int(model_runner.req_to_token_pool.size),
        T=int(draft_tokens),
        H=int(backend.num_head),
        layer_of=layers,
        pool_slots=int(pool.kv_buffer[0].shape[0]) if layers else 0,
        algorithm=_algorithm(model_runner),
        rank=rank_of(model_runner),
        tp_size=_parallel(model_runner, "tp_size"),
        model=_model(model_runner),
    )


def _layers_of(pool: Any) -> dict[int, int]:
    buffers = getattr(pool, "kv_buffer", None)
    if not isinstance(buffers, list) or not buffers or tuple(buffers[0].shape[1:]) != (1, D_QK):
        return {}
    first = int(getattr(pool, "start_layer", 0) or 0)
    return {buffer.data_ptr(): first + i for i, buffer in enumerate(buffers)}


def _device(model_runner: Any) -> str:
    return f"cuda:{model_runner.gpu_id}" if str(model_runner.device) == "cuda" else str(model_runner.device)


def _algorithm(model_runner: Any) -> str:
    algorithm = getattr(model_runner, "spec_algorithm", None)
    return str(getattr(algorithm, "name", algorithm)).lower()


def _model(model_runner: Any) -> str:
    config = getattr(getattr(model_runner, "model_config", None), "hf_config", None)
    architectures = getattr(config, "architectures", None)
    if not architectures:
        return "unknown"
    return f"{architectures[0]}, {getattr(config, 'num_hidden_layers', 'unknown')} layers"


def rank_of(model_runner: Any) -> str:
    """`tp0`, with `-pp1` where there is more than one pipeline stage."""
    tp, pp, pp_size = (_parallel(model_runner, name) for name in ("tp_rank", "pp_rank", "pp_size"))
    return f"tp{tp}-pp{pp}" if pp_size > 1 else f"tp{tp}"


def _parallel(model_runner: Any, name: str) -> int:
    value = getattr(model_runner, name, None)
    if value is None:  # newer releases keep ranks in the runtime context
        from sglang.srt.runtime_context import get_parallel

        value = getattr(get_parallel(), name)
    return int(value)


def tp_cpu_group() -> Any:
    """The tensor-parallel ranks' process group for host memory."""
    from sglang.srt.distributed import get_tp_group

    return get_tp_group().cpu_group


def has_slot(backend: Any) -> bool:
    """Whether this release's `forward_extend` asks the verify slot at all."""
    return "verify_splitkv_fwd" in _unwrapped(type(backend).forward_extend).__code__.co_names


def _unwrapped(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def own_occupant(backend: Any) -> Callable[..., bool] | None:
    """The function that SGLang itself would have called in the slot (AMD only), or None."""
    if getattr(backend, "use_verify_shared_kv", False):
        return backend.verify_shared_kv_fwd
    if getattr(backend, "use_verify_splitkv", False):
        return backend.verify_splitkv_fwd
    return None


def enter_slot(backend: Any, function: Callable[..., bool]) -> None:
    """Make every verify step of `backend` ask `function` first; it returns True where it wrote the output.

    A release without the slot is entered where it calls its extend kernel; there only steps with a tree mask
    are known to be verify steps, so chains without a mask stay with Triton.
    """
    function = _not_compiled(function)
    if has_slot(backend):
        backend.verify_splitkv_fwd = function
        backend.use_verify_splitkv = True
        if hasattr(backend, "use_verify_shared_kv"):
            backend.use_verify_shared_kv = False  # it would be asked instead of ours
        return
    triton = backend.extend_attention_fwd

    def extend_attention_fwd(*args: Any, **kwargs: Any) -> Any:
        mask = args[SlotCall._fields.index("custom_mask")]
        if mask is None or not function(*args, **kwargs):
            return triton(*args, **kwargs)
        return None

    backend.extend_attention_fwd = extend_attention_fwd


def _not_compiled(function: Callable[..., bool]) -> Callable[..., bool]:
    import torch

    return torch.compiler.disable(function)


def triton_of(backend: Any) -> Callable[[SlotCall, Any], None]:
    """The extend kernel as SGLang calls it when the slot says no; the returned function writes `out`."""
    kernel = backend.extend_attention_fwd  # eligible backends have its default page size, 1

    def run(call: SlotCall, out: Any) -> None:
        kernel(
            *call._replace(o=out)[: SlotCall._fields.index("logit_cap")],
            logit_cap=call.logit_cap,
            sliding_window_size=call.sliding_window_size,
            sinks=call.sinks,
            window_kv_offsets=call.window_kv_offsets,
            xai_temperature_len=call.xai_temperature_len,
        )

    return run


class CurrentBatch:
    """The `ForwardBatch` of the running `forward_extend`: the slot is not given it, a capture needs it."""

    def __init__(self) -> None:
        self.forward_batch: Any = None

    def watch(self, backend: Any) -> None:
        """Wrap this backend's `forward_extend`, and only this one's."""
        inner = backend.forward_extend

        def forward_extend(q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kw: Any) -> Any:
            self.forward_batch = forward_batch
            try:
                return inner(q, k, v, layer, forward_batch, *args, **kw)
            finally:
                self.forward_batch = None

        backend.forward_extend = forward_extend


def version_of(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
