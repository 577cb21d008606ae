"""`lm_head_from_model`: the output head of a transformers model, whatever holds its parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from .collectives import share_with_group
from .lm_head import LMHead, LoRAFactors, VocabShard
from .row_fetch import row_shards

Scores = tuple[torch.Tensor, ...]

_SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "module")


@dataclass(frozen=True)
class ModelHead:
    """The output head of a model, to be read where its parameters are whole.

    `score_support` runs inside the head module's own call, with scores in place of logits, so that whatever hooks the
    module sees an ordinary call:

    - DeepSpeed ZeRO-3 gathers the weight before, releases it after, and again around its backward; with tied embeddings
      it is at hand already.
    - FSDP2 unshards and reshards the unit that holds the head, be it the root, a `[norm, head]` group or the head
      alone, and reduces its gradient. FSDP1 does likewise.
    - Where only some rows are needed, and that pays, they alone are fetched instead; see `row_fetch`.
    - PEFT: LoRA factors take part through their own modules; of `modules_to_save` the active copy is used.
    - Hugging Face tensor parallelism: the `Shard(0)` weight is used in place and the module is not called, since its
      call would gather the logits of the whole vocabulary.
    - A head on another device than the backbone (`device_map`) pulls the hidden states to itself.

    Attributes:
        module: what `get_output_embeddings` returns.
        logit_scale, softcap: as in `LMHead`.
    """

    module: nn.Module
    logit_scale: float = 1.0
    softcap: float | None = None

    def call(self, hidden: torch.Tensor, score: Callable[[torch.Tensor, LMHead], Scores]) -> Scores:
        """`score(hidden, head)`, run where the head's parameters are whole.

        Raises:
            ValueError: a head that is not one linear projection, or whose weight is nowhere near.
        """
        base, lora = _resolve(self.module)
        tensor_parallel = isinstance(_held(base, "weight"), DTensor) and not any(
            isinstance(x, FSDPModule) for x in (self.module, base)
        )

        def with_parameters(hidden: torch.Tensor) -> Scores:
            head = self._parameters(base, lora)
            return score(hidden.to(head.weight.device), head)

        if tensor_parallel:
            return with_parameters(hidden)
        function = with_parameters
        if lora is not None:
            for module in (lora.b, lora.a, base):
                function = _in_call_of(module, module, function)
        innermost = base if lora is None else lora.layer
        return _in_call_of(self.module, innermost, function)(hidden)

    def fetch_rows(self, wanted: Callable[[], np.ndarray | None]) -> LMHead | None:
        """Some rows of a sharded head as a head of their own, or `None` where it is to be read whole.

        Every rank of the sharding group calls this before `call`, with what it needs.

        Args:
            wanted: returns `[U]` sorted distinct candidates, or `None` if this rank needs the whole head. It is called
                only if the head is sharded in a way that rows can be fetched from.
        """
        base, lora = _resolve(self.module)
        shards = row_shards(base, _held(base, "weight")) if lora is None else None
        bias = _held(base, "bias")
        bias_shards = None if bias is None else row_shards(base, bias)
        if shards is None or (bias is not None and bias_shards is None):
            return None
        ids = wanted()
        weight = shards.fetch(ids)
        if weight is None:
            return None
        fetched_bias = None if bias_shards is None else bias_shards.fetch(ids)
        return LMHead(
            weight,
            None if fetched_bias is None else fetched_bias.squeeze(1),
            logit_scale=self.logit_scale,
            softcap=self.softcap,
        )

    def _parameters(self, base: nn.Module, lora: _ActiveLoRA | None) -> LMHead:
        weight: Any = base.weight
        _check_weight(weight, base)
        shard = _vocab_shard(weight) if isinstance(weight, DTensor) else None
        return LMHead(
            weight=_local(weight),
            bias=_local(getattr(base, "bias", None)),
            shard=shard,
            logit_scale=self.logit_scale,
            softcap=self.softcap,
            lora=None if lora is None else lora.factors(shard),
        )


def lm_head_from_model(model: Any) -> ModelHead:
    """The output head of a causal language model, with the scale and softcap of its family.

    Args:
        model: a transformers causal language model, not a wrapper of one. Score with the result inside its forward:
            that is where FSDP and ZeRO expect their parameters to be used.

    Raises:
        ValueError: a head that is not one linear projection of the last hidden state.
    """
    module = model.get_output_embeddings()
    family = type(model).__name__
    if not isinstance(module, nn.Module) or isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise ValueError(
            f"{family} has {'no output head' if module is None else f'{len(module)} output heads'}; supports can be "
            "scored on one linear head."
        )
    path = [
        part
        for name, candidate in model.named_modules()
        if candidate is module
        for part in name.split(".")
        if part not in _WRAPPERS
    ]
    if len(path) > 1:
        raise ValueError(
            f"The output head of {family} is {'.'.join(path)}, a part of a larger head: what comes before or after the "
            "projection is unknown here. Supports can be scored on a linear head that takes the last hidden state."
        )
    if getattr(model, "final_logits_bias", None) is not None:
        raise ValueError(f"{family} adds final_logits_bias to its logits, which support scores would leave out.")
    _resolve(module)
    config = model.config.get_text_config()
    return ModelHead(module, _logit_scale(config), _first(config, _SOFTCAPS))


def _logit_scale(config: Any) -> float:
    scale = _first(config, _SCALES)
    if scale is not None:
        return scale
    scaling = _first(config, ("logits_scaling",))
    if scaling is None:
        return 1.0
    return scaling if config.model_type == "hyperclovax" else 1.0 / scaling


def _first(config: Any, names: tuple[str, ...]) -> float | None:
    values = (getattr(config, name, None) for name in names)
    return next((float(value) for value in values if isinstance(value, int | float)), None)


@dataclass(frozen=True)
class _ActiveLoRA:
    """The one active adapter of a PEFT layer: its modules, each with parameters of its own."""

    layer: nn.Module
    a: nn.Linear
    b: nn.Linear
    dropout: nn.Module
    scaling: float

    def factors(self, shard: VocabShard | None) -> LoRAFactors:
        a, b = _local(self.a.weight), self.b.weight  # [r, H], [V, r]
        if shard is not None and not isinstance(b, DTensor):
            # Every rank holds all of b, and uses the rows of its own shard.
            (b,) = share_with_group(shard.group, b)
            b = b[shard.start : shard.stop]
        return LoRAFactors(a, _local(b), self.scaling, self.dropout)


def _resolve(module: Any) -> tuple[nn.Module, _ActiveLoRA | None]:
    """The linear layer that a head consists of, and the LoRA adapter that is active on it.

    Raises:
        ValueError: anything else.
    """
    if isinstance(module, FullyShardedDataParallel):
        return _resolve(module.module)
    if hasattr(module, "modules_to_save"):  # PEFT's copies of whole modules
        adapters = [] if module.disable_adapters else [x for x in module.active_adapters if x in module.modules_to_save]
        return _resolve(module.modules_to_save[adapters[0]] if adapters else module.original_module)
    if hasattr(module, "base_layer") and hasattr(module, "lora_A"):
        base, inner = _resolve(module.base_layer)
        return base, inner or _active_lora(module)
    if isinstance(module, nn.Linear):
        return module, None
    raise ValueError(
        f"The output head is a {type(module).__name__}; supports can be scored on torch.nn.Linear, alone or with a "
        "PEFT LoRA adapter or in modules_to_save."
    )


def _active_lora(layer: Any) -> _ActiveLoRA | None:
    if layer.disable_adapters or layer.merged:
        return None
    adapters = [name for name in layer.active_adapters if name in layer.lora_A]
    if not adapters:
        return None
    if len(adapters) > 1:
        raise ValueError(f"The adapters {', '.join(adapters)} are active together on the output head; activate one.")
    (name,) = adapters
    if name in getattr(layer, "lora_variant", {}):
        kind = type(layer.lora_variant[name]).__name__
        raise ValueError(f"The adapter {name!r} on the output head is a {kind}; only plain LoRA can be scored there.")
    if not isinstance(layer.lora_A[name], nn.Module):  # AdaLoRA has bare parameters
        raise ValueError(
            f"The adapter {name!r} on the output head belongs to a {type(layer).__name__}; only plain LoRA can be "
            "scored there."
        )
    if layer.lora_B[name].bias is not None:
        raise ValueError(f"The adapter {name!r} on the output head has lora_bias=True; only plain LoRA can be scored.")
    return _ActiveLoRA(
        layer, layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name], float(layer.scaling[name])
    )


def _in_call_of(module: nn.Module, innermost: nn.Module, function: Callable[[torch.Tensor], Scores]) -> Any:
    """`function`, to be run as the forward of `innermost` inside a call of `module`."""

    def call(hidden: torch.Tensor) -> Scores:
        made: list[Scores] = []

        def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Scores:
            made.append(function(hidden))
            return made[0]

        replaced = innermost.__dict__.get("forward")
        innermost.forward = forward  # type: ignore[assignment]
        try:
            scores = module(hidden)
        finally:
            if replaced is None:
                del innermost.forward
            else:
                innermost.forward = replaced
        # FSDP2's output_dtype rounds what a module returns. The hook that backward needs sits on what went in.
        rounded = any(got.dtype != own.dtype for got, own in zip(scores, made[0], strict=True))
        return made[0] if rounded else scores

    return call


def _check_weight(weight: Any, module: nn.Module) -> None:
    kind = type(module).__name__
    if not weight.dtype.is_floating_point or hasattr(weight, "quant_state"):
        raise ValueError(
            f"The output head is quantised ({kind} of {weight.dtype}). Keep it in floating point: name it in the "
            "quantisation's modules to skip (for bitsandbytes: llm_int8_skip_modules=['lm_head'])."
        )
    if weight.is_meta:
        raise ValueError("The output head's weight is on the meta device (offloaded). Keep the head on a device.")
    if weight.dim() != 2 or weight.numel() == 0 and not isinstance(weight, DTensor):
        raise ValueError(
            f"The output head's weight has shape {tuple(weight.shape)}: it is sharded and was not gathered. Score "
            "inside the model's forward."
        )


def _vocab_shard(weight: DTensor) -> VocabShard:
    mesh, placements = weight.device_mesh, weight.placements
    dims = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    if len(dims) != 1 or not placements[dims[0]].is_shard(0):
        raise ValueError(
            f"The output head's weight is a DTensor placed as {placements}; supports can be scored where one mesh "
            "dimension shards the vocabulary, Shard(0), and no other splits the weight."
        )
    (dim,) = dims
    step = -(-weight.shape[0] // mesh.size(dim))  # as torch.chunk splits
    start = min(step * mesh.get_local_rank(dim), weight.shape[0])
    return VocabShard(start, start + weight.to_local().shape[0], mesh.get_group(dim))


def _held(module: nn.Module, name: str) -> Any:
    """A parameter as the module holds it; `module.weight` would make ZeRO-3 gather it on the spot, to be kept."""
    held = module._parameters.get(name)
    return getattr(module, name) if held is None else held


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
