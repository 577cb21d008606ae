"""Find a Megatron model's routers, and refuse those whose choices cannot be replayed exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from ..routing.errors import RouterReplayError, UnreplayableRouterError
from .core import Router, TopKRouter, TransformerConfig
from .sequence_shard import SequenceShard

_BYPASSES_TOPK = {"sinkhorn", "quantile_balancing"}


def _is_set(value: Any) -> bool:
    return bool(value)


def _is_given(value: Any) -> bool:
    return value is not None


# Setting, when it is refused, why. Settings that a version does not have yet count as unset.
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("moe_router_fusion", _is_set, "the fused kernel chooses experts itself; set it to False"),
    (
        "moe_router_load_balancing_type",
        lambda value: not _BYPASSES_TOPK.isdisjoint([value] if isinstance(value, str) else value),
        "this kind of balancing chooses experts without the router's top-k; choose 'none' or an auxiliary loss",
    ),
    (
        "mtp_num_layers",
        _is_set,
        "the engine records no routes for multi-token prediction layers; train without them (None)",
    ),
    (
        "overlap_moe_expert_parallel_comm",
        _is_set,
        "forward and backward of different micro-batches run interleaved, layer by layer, so that a router cannot tell "
        "whose routes it needs; set it to False",
    ),
    ("moe_router_force_load_balancing", _is_set, "it replaces the router's logits by random ones; set it to False"),
    ("moe_router_force_biased", _is_given, "it adds random biases to the router's logits; set it to None"),
    ("moe_expert_capacity_factor", _is_given, "it drops tokens that the engine did process; set it to None"),
    ("moe_expert_rank_capacity_factor", _is_given, "it drops tokens that the engine did process; set it to None"),
    (
        "cuda_graph_impl",
        lambda value: value not in (None, "none"),
        "a captured graph repeats the routes it was captured with; set it to 'none'",
    ),
)


@dataclass(frozen=True)
class LocalRouter:
    """A router on this rank.

    Attributes:
        name: the module's name within its model chunk.
        module: the router.
        layer: global layer number, from 0, over all pipeline stages and dense layers.
    """

    name: str
    module: TopKRouter
    layer: int


@dataclass(frozen=True)
class ModelChunk:
    """One model chunk of this rank's pipeline stage.

    Attributes:
        model: the innermost module, without wrappers.
        config: the model's.
        routers: in order of their layers; none in a chunk of dense layers.
        shard: the part of the sequence that its layers work on.
    """

    model: nn.Module
    config: TransformerConfig
    routers: tuple[LocalRouter, ...]
    shard: SequenceShard


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside Megatron's wrappers (mixed precision, data parallelism)."""
    inner = getattr(model, "module", None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model


def find_chunks(model_chunks: Sequence[nn.Module]) -> tuple[ModelChunk, ...]:
    """The chunks with their routers.

    Raises:
        UnreplayableRouterError: a router or a setting that routes cannot be replayed with, by name.
        RouterReplayError: no chunk, or a router in a layer that `moe_layer_freq` calls dense.
    """
    if not model_chunks:
        raise RouterReplayError("There is no model chunk to replay routes in.")
    chunks = tuple(_chunk(unwrap(model)) for model in model_chunks)
    check_replayable(chunks[0].config, len(chunks), type(chunks[0].model).__name__)
    return chunks


def moe_layers(config: TransformerConfig) -> tuple[int, ...]:
    """Global numbers, from 0, of the layers with a mixture of experts, over the whole model.

    Raises:
        RouterReplayError: `moe_layer_freq` is a list of another length than `num_layers`.
    """
    every = config.moe_layer_freq
    if isinstance(every, int):
        return tuple(range(0, config.num_layers, every))
    if len(every) != config.num_layers:
        raise RouterReplayError(f"moe_layer_freq has {len(every)} entries, num_layers is {config.num_layers}.")
    return tuple(layer for layer, is_moe in enumerate(every) if is_moe)


def check_replayable(config: TransformerConfig, num_chunks: int, model_type: str) -> None:
    """Refuse settings under which a router would not take the replayed experts.

    Args:
        config: the model's.
        num_chunks: model chunks on this rank; more than one in an interleaved pipeline.
        model_type: what to call the model in errors.

    Raises:
        UnreplayableRouterError: naming the setting, its value, and what to do.
    """
    if not config.num_moe_experts:
        raise UnreplayableRouterError(model_type, "num_moe_experts is not set, so there is no router")
    for setting, is_refused, reason in _REFUSED:
        value = getattr(config, setting, None)
        if is_refused(value):
            raise UnreplayableRouterError(model_type, f"with {setting}={value!r}, {reason}")
    if num_chunks > 1 and config.pipeline_model_parallel_size == 2 and config.batch_p2p_comm:
        raise UnreplayableRouterError(
            model_type,
            "with batch_p2p_comm=True, an interleaved pipeline of 2 stages mixes up the activations of its "
            "micro-batches, and the losses are silently wrong; set overlap_p2p_comm=True and batch_p2p_comm=False",
        )


def _chunk(model: nn.Module) -> ModelChunk:
    config = cast(TransformerConfig, model.config)
    with_experts = moe_layers(config)
    routers = []
    for name, module in model.named_modules():
        if not isinstance(module, Router):
            continue
        if not isinstance(module, TopKRouter):
            raise UnreplayableRouterError(
                type(model).__name__, f"{name} is a {type(module).__name__}, which is not known to choose by top-k"
            )
        layer = module.layer_number - 1
        if layer not in with_experts:
            raise RouterReplayError(
                f"{name} has layer number {layer} (from 0), but moe_layer_freq={config.moe_layer_freq} puts experts "
                f"into the layers {with_experts}."
            )
        routers.append(LocalRouter(name, module, layer))
    routers.sort(key=lambda router: router.layer)
    shard = SequenceShard()
    if routers:
        router = routers[0].module
        shard = SequenceShard.from_groups(router.cp_group, router.tp_group, config.sequence_parallel)
    return ModelChunk(model, config, tuple(routers), shard)
