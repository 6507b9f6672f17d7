"""A model without weights: a folder with a config.json, and a seeded initialisation that SGLang's dummy loader runs.

DeepSeek-V3's shape as one tensor-parallel rank sees it, without experts. SGLang's own dummy weights are tiny, norms
included, so that every score is about zero and attention is uniform; these are normal, scaled to keep the residual
stream at unit size, so that attention has something to choose.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from harness.live_spec import VOCABULARY, LiveSpec

YARN_ORIGINAL = 4096
WEIGHTS_TARGET = "sglang.srt.model_loader.loader.initialize_dummy_weights"


def model_config(spec: LiveSpec) -> dict[str, Any]:
    """The content of config.json."""
    positions = max(163840, spec.context_length)
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": spec.hidden,
        "intermediate_size": 2 * spec.hidden,
        "moe_intermediate_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "first_k_dense_replace": spec.layers,  # no layer has experts
        "num_nextn_predict_layers": 1,
        "num_attention_heads": spec.heads * spec.tp,
        "num_key_value_heads": spec.heads * spec.tp,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "moe_layer_freq": 1,
        "q_lora_rank": 512,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "max_position_embeddings": positions,
        "rope_scaling": {
            "type": "yarn",
            "factor": -(-positions // YARN_ORIGINAL),
            "original_max_position_embeddings": YARN_ORIGINAL,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def build_model(folder: Path, spec: LiveSpec) -> Path:
    """Write the model folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config(spec), indent=1))
    return folder


def seeded_weights(model: Any, *args: Any, **kwargs: Any) -> None:
    """Takes the place of SGLang's `initialize_dummy_weights`. The same name, shape and rank give the same values.

    A parameter that is split over ranks gets values of its own on each; one that every rank holds whole is the same on
    all. Nothing but matrices is drawn where a norm stands: its weights are 1.
    """
    import torch

    for name, parameter in model.named_parameters():
        values = parameter.data
        if not torch.is_floating_point(values):
            continue
        if "norm" in name:
            values.fill_(1.0)
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        seed = zlib.crc32(f"{name}@{_rank_of_shard(owner)}".encode())
        generator = torch.Generator(device=values.device).manual_seed(seed)
        drawn = torch.randn(values.shape, generator=generator, device=values.device, dtype=torch.float32)
        values.copy_(drawn * _scale(name, owner, values))


def _scale(name: str, owner: Any, values: Any) -> float:
    if values.dim() < 2 or "embed" in name:
        return 1.0
    inputs = values.shape[-1] * (_ranks_of(owner) if getattr(owner, "input_is_parallel", False) else 1)
    return float(inputs**-0.5)


def _ranks_of(owner: Any) -> int:
    # Replicated layers have neither attribute; a mixture of experts has the second.
    return max(getattr(owner, "tp_size", None) or 1, getattr(owner, "moe_tp_size", None) or 1)


def _rank_of_shard(owner: Any) -> int:
    """The rank whose part of a parameter `owner` holds; 0 where every rank holds all of it."""
    if _ranks_of(owner) == 1:
        return 0
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


def register_weights() -> None:
    """Hook the initialisation in this process, before SGLang applies its hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(WEIGHTS_TARGET, seeded_weights, HookType.REPLACE)
