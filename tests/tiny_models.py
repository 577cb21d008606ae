"""Tiny models that tests share, and their tokenizer of characters."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

_COMMON = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}


def tokenizer_of(symbols: list[str], **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are these symbols."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    unknown = "?" if "?" in symbols else symbols[0]
    model = BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[], unk_token=unknown)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **special)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """99 tokens: three special ones, the end of a line, and what ASCII prints."""
    symbols = ["<pad>", "<bos>", "<eos>", "\n", *(chr(c) for c in range(32, 127))]
    tokenizer = tokenizer_of(symbols, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    return tokenizer


def llama(sharpness: float = 1.0, seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    """A Llama of 2 layers that speaks in characters; `sharpness` multiplies its logits, so that truncation cuts."""
    return _sharp(LlamaForCausalLM, LlamaConfig(**_COMMON | {"num_hidden_layers": 2} | settings), sharpness, seed)


def qwen3_moe(sharpness: float = 1.0, seed: int = 0, **settings: Any) -> Qwen3MoeForCausalLM:
    """The same with 3 layers and 8 experts, 2 for each token."""
    config = Qwen3MoeConfig(**_COMMON | _EXPERTS | {"num_hidden_layers": 3} | settings)
    return _sharp(Qwen3MoeForCausalLM, config, sharpness, seed)


def _sharp(model_class: Any, config: Any, sharpness: float, seed: int) -> Any:
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
    return model


def save(model: Any, path: Any, tokenizer: Any = None) -> str:
    """The path, with the model there and its tokenizer, which is that of characters if none is given."""
    model.save_pretrained(path)
    (tokenizer or character_tokenizer()).save_pretrained(path)
    return str(path)


def save_tiny_model(path: Any) -> str:
    """A Llama with 99 characters and sharp logits."""
    return save(llama(sharpness=20), path)
