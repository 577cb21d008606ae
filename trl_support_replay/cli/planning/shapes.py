"""Reads the sizes of a model from its configuration: it is built on PyTorch's meta device, which holds no values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ...errors import CommandError


@dataclass(frozen=True)
class ModelShapes:
    """Sizes that memory depends on.

    Attributes:
        parameters: all of them, tied ones once.
        trainable: those that get a gradient; all of them without an adapter.
        largest_unit: parameters of the largest part that sharding gathers at a time, a decoder layer or the embedding.
        layers, hidden, vocab: sizes of the decoder.
        kv_width: columns of the keys and of the values together.
        kept_per_layer: values per token that one layer keeps for its backward; see `memory`.
        moe_layers, experts, experts_per_token: of a mixture of experts; 0 for a dense model.
    """

    parameters: int
    trainable: int
    largest_unit: int
    layers: int
    hidden: int
    vocab: int
    kv_width: int
    kept_per_layer: int
    moe_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0


def read_shapes(model: str, revision: str | None, trust_remote_code: bool, peft_config: Any = None) -> ModelShapes:
    """Sizes of the model of that name or folder.

    Args:
        model: a folder with a `config.json`, or a name on the Hub, whose `config.json` alone is fetched.
        revision: of the Hub repository.
        trust_remote_code: as for `from_pretrained`.
        peft_config: the adapter that will be trained; `None` trains every parameter.

    Raises:
        CommandError: the configuration cannot be read.
    """
    try:
        config = AutoConfig.from_pretrained(model, revision=revision or "main", trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        absent = "" if Path(model).exists() else " It is no folder here (the one of the CPU recipe: make recipe-cpu)."
        raise CommandError(
            f"The configuration of {model} cannot be read, so its memory cannot be estimated: "
            f"{str(error).splitlines()[0]}{absent} Name a folder that holds its config.json, or go online "
            "(HF_HUB_OFFLINE=0)."
        ) from error
    with torch.device("meta"):
        built: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        built.tie_weights()
        parameters = sum(p.numel() for p in built.parameters())
        layers = _decoder_layers(built)
        largest = max(_size(built.get_input_embeddings()), *(map(_size, layers)))
        moe_layers = sum(any(name.endswith("experts") for name, _ in layer.named_modules()) for layer in layers)
        trainable = parameters
        if peft_config is not None:
            from peft import get_peft_model

            adapted = get_peft_model(built, peft_config)
            trainable = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    return _shapes(config.get_text_config(), parameters, trainable, largest, moe_layers)


def _decoder_layers(model: Any) -> list[nn.Module]:
    count = model.config.get_text_config().num_hidden_layers
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    return list(stacks[0])


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _shapes(text: Any, parameters: int, trainable: int, largest: int, moe_layers: int) -> ModelShapes:
    heads, hidden = text.num_attention_heads, text.hidden_size
    head = getattr(text, "head_dim", None) or hidden // heads
    kv_width = 2 * (getattr(text, "num_key_value_heads", None) or heads) * head
    names = ("num_experts", "num_local_experts", "n_routed_experts") if moe_layers else ()
    experts = next((getattr(text, name) for name in names if getattr(text, name, 0)), 0)
    per_token = text.num_experts_per_tok if moe_layers else 0
    inner = (getattr(text, "moe_intermediate_size", None) if moe_layers else None) or text.intermediate_size
    feed_forward = per_token * (2 * hidden + 4 * inner) if moe_layers else 4 * inner
    return ModelShapes(
        parameters=parameters,
        trainable=trainable,
        largest_unit=largest,
        layers=text.num_hidden_layers,
        hidden=hidden,
        vocab=text.vocab_size,
        kv_width=kv_width,
        kept_per_layer=8 * hidden + 4 * heads * head + 2 * kv_width + feed_forward,
        moe_layers=moe_layers,
        experts=experts,
        experts_per_token=per_token,
    )
