"""Tiny mixture-of-experts models on disk that vLLM can load too, with routers sharp enough that routes matter."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Glm4MoeConfig, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig
from transformers.models.auto import AutoModelForCausalLM

VOCABULARY, NUM_EXPERTS, TOP_K = 256, 16, 4

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def qwen3_moe_config() -> PreTrainedConfig:
    """Layer 1 is dense, layers 0, 2 and 3 have experts."""
    return Qwen3MoeConfig(
        **_COMMON, num_key_value_heads=2, head_dim=32, num_experts=NUM_EXPERTS, mlp_only_layers=[1], norm_topk_prob=True
    )


def glm4_moe_config() -> PreTrainedConfig:
    """GLM-4.5 and DeepSeek-V3 style routing: sigmoid scores, a bias for the choice, groups, a dense first layer."""
    return Glm4MoeConfig(
        **_COMMON,
        num_key_value_heads=2,
        head_dim=32,
        n_routed_experts=NUM_EXPERTS,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
    )


def build_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A float32 model whose router scores are far apart and whose experts differ."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3 if "gate.weight" in name else 0.15)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)
    return model.eval()


def save_model(config: PreTrainedConfig, path: Path, seed: int = 0) -> PreTrainedModel:
    """`build_model`, saved with its configuration. There is no tokenizer: prompts are token ids."""
    model = build_model(config, seed)
    model.save_pretrained(path)
    return model
