"""A tiny model of every mixture-of-experts family that `transformers` has, with routers sharp enough to matter."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

NUM_EXPERTS, TOP_K, VOCABULARY = 8, 2, 128
UNSET = object()

# Every spelling that a configuration may use; a family takes those it knows.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": NUM_EXPERTS,
    "num_local_experts": NUM_EXPERTS,
    "n_routed_experts": NUM_EXPERTS,
    "moe_num_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_experts_per_token": TOP_K,
    "moe_topk": TOP_K,
    "moe_k": TOP_K,
    "top_k_experts": TOP_K,
    "n_group": 2,
    "topk_group": 1,
    "num_expert_groups": 1,
    "num_limited_groups": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_cache": False,
    "sliding_window": 16,
    "shared_intermediate_size": 16,
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 0,
    "norm_topk_prob": True,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 48,
}
_FULL = ["full_attention"] * 3
_LATENT = {"head_dim": UNSET, "num_key_value_heads": 4}

# Families that are replayed: what they need beside the common settings.
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {"layer_types": _FULL},
    "aria_text": {},
    "axk1": _LATENT,
    "axk2": _LATENT,
    "cohere2_moe": {"layer_types": _FULL},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": NUM_EXPERTS, "moe_top_k": TOP_K},
    },
    "deepseek_v2": {**_LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "dots1": {},
    "ernie4_5_moe": {"moe_layer_start_index": 1},
    "exaone_moe": {"layer_types": _FULL},
    "flex_olmo": {},
    "gemma4_text": {"layer_types": _FULL, "global_head_dim": 8, "vocab_size_per_layer_input": VOCABULARY},
    "glm4_moe": {"n_group": 1},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "gpt_oss": {"layer_types": _FULL},
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoehybrid": {"layer_types": ["attention"] * 3, "mamba_n_heads": 8, "mamba_d_head": 8},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hy_v4": _LATENT,
    "inkling_text": {},
    "jamba": {
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "attn_layer_period": 1,
        "attn_layer_offset": 0,
        "use_mamba_kernels": False,
    },
    "kimi_linear": {**_LATENT, "layer_types": _FULL},
    "laguna": {},
    "lfm2_moe": {"layer_types": _FULL},
    "llama4_text": {"num_experts_per_tok": 1, "moe_layers": [0, 1, 2], "interleave_moe_layer_step": 1},
    "longcat_flash": {**_LATENT, "head_dim": 8, "num_layers": 2, "zero_expert_num": 1},
    "mellum": {},
    "mimo_v2_flash": {},
    "minimax": {"layer_types": _FULL},
    "minimax_m2": {},
    "minimax_m3_vl_text": {},
    "mixtral": {},
    "nemotron_h": {"hybrid_override_pattern": "*E*E"},
    "olmoe": {},
    "qwen2_moe": {},
    "qwen3_5_moe_text": {"layer_types": _FULL},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen3_next": {"layer_types": _FULL},
    "qwen4_exp_text": {},
    "solar_open": {},
}
# Families that are refused.
REFUSED: dict[str, dict[str, Any]] = {
    "deepseek_v4": {},
    "doge": {"is_moe": True, "num_experts": 16},
    "jetmoe": {"kv_channels": 8},
    "phimoe": {},
    "zaya": {"num_experts_per_tok": 1},
}


def build(
    model_type: str, *, dtype: torch.dtype = torch.float32, experts: str | None = "eager", **settings: Any
) -> PreTrainedModel:
    """A tiny model, in training mode without dropout; `settings` change its configuration."""
    config_class = CONFIG_MAPPING[model_type]
    known = set(inspect.signature(config_class.__init__).parameters)
    if dataclasses.is_dataclass(config_class):
        known |= {field.name for field in dataclasses.fields(config_class)}
    values = {name: value for name, value in _COMMON.items() if name in known}
    values |= {**FAMILIES, **REFUSED}[model_type] | settings
    config = config_class(**{name: value for name, value in values.items() if value is not UNSET})
    config._attn_implementation = "eager"
    config._experts_implementation = experts
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.to(dtype).train()
