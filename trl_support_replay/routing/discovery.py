"""Find the routers of a mixture-of-experts model: one forward, watched for the top-k over its experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from .errors import UnreplayableRouterError

# How configurations spell the number of experts of a layer.
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

# Families whose routing no recorded top-k describes. The checks on what the probe saw would refuse most of them too;
# here they get a reason that a user can act on.
REFUSED_FAMILIES = {
    "deepseek_v4": "its first layers choose experts by a fixed hash of the token id, not by a top-k of scores",
    "doge": "its experts are found by product keys, the sum of two top-k searches, so no single top-k holds a route",
    "jetmoe": "each layer has a second router inside its attention, so a layer number does not name one router",
    "nllb_moe": "its router drops tokens over the experts' capacity, which depends on the rest of the batch",
    "phimoe": "its router picks experts one after another by masked maxima (sparsemixer), without a top-k",
    "switch_transformers": "its router drops tokens over the experts' capacity, which depends on the rest of the batch",
    "zaya": "its routers have one class more than the model has experts (skip the layer), which engines do not number",
}

_TOPK = frozenset({torch.topk, torch.Tensor.topk})


@dataclass(frozen=True)
class Router:
    """One router of a model.

    Attributes:
        name: qualified name of the module whose own forward calls the top-k.
        module: that module.
        layer: global layer number.
        num_experts: `E`, the size of the top-k's last dimension.
        top_k: `k`.
        num_calls: how many top-k calls over `E` one forward makes. The last is the routing; models that limit the
            choice to groups of experts may make one before it, when they have a single group.
    """

    name: str
    module: nn.Module
    layer: int
    num_experts: int
    top_k: int
    num_calls: int


def topk_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, int, int]:
    """`(input, k, dim)` of a call of `torch.topk` or `Tensor.topk`, however they were passed."""
    tensor = args[0] if args else kwargs["input"]
    k = args[1] if len(args) > 1 else kwargs["k"]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    return tensor, int(k), dim % tensor.dim()


def is_topk(func: Callable) -> bool:
    """Whether a torch function is a top-k."""
    return func in _TOPK


def find_routers(model: nn.Module, probe: Callable[[], Any] | None = None) -> tuple[Router, ...]:
    """The routers of `model`, in the order of their layers.

    The model runs once, in evaluation mode and without gradients; its own training flags are put back. With sharded
    parameters (ZeRO-3, FSDP) this is a collective call.

    Args:
        model: a Hugging Face model, wrapped (DDP, PEFT, …) or not.
        probe: runs the model once on a few tokens. Default: `model(input_ids=…)`.

    Raises:
        UnreplayableRouterError: no mixture of experts, a family that cannot be replayed, or layers with experts whose
            router made no top-k over them.
    """
    model_type, counts = _expert_counts(model)
    if model_type in REFUSED_FAMILIES:
        raise UnreplayableRouterError(model_type, REFUSED_FAMILIES[model_type])
    if not counts:
        raise UnreplayableRouterError(
            model_type, f"its configuration names no number of experts ({', '.join(_EXPERT_COUNTS)})"
        )
    calls = _watch_topk(model, counts, probe or (lambda: _run(model, counts)))
    names = {module: name for name, module in model.named_modules()}
    # A top-k outside of all layers is no routing: the load-balancing loss counts choices with one.
    routers = [
        _router(model_type, names[module], layer, module, forwards)
        for module, forwards in calls.items()
        if (layer := layer_number(names[module])) is not None
    ]
    routers.sort(key=lambda router: router.layer)
    _check_complete(model_type, model, routers)
    return tuple(routers)


def has_experts(model: nn.Module) -> bool:
    """Whether a model's configuration names a number of experts, replayable or not."""
    return bool(_expert_counts(model)[1])


def configs(model: nn.Module) -> Iterator[Any]:
    """The configuration of a model, wrapped or not, and those of its parts (`text_config`, ...)."""
    root = next((m.config for m in model.modules() if hasattr(getattr(m, "config", None), "model_type")), None)
    pending = [] if root is None else [root]
    while pending:
        config = pending.pop(0)
        yield config
        pending.extend(v for k, v in vars(config).items() if k.endswith("_config") and hasattr(v, "to_dict"))


def _expert_counts(model: nn.Module) -> tuple[str, set[int]]:
    parts = list(configs(model))
    counts = {getattr(config, name, None) for config in parts for name in _EXPERT_COUNTS}
    # "Zero experts" pass a token through; the router chooses among them as among the others.
    counts |= {
        n + getattr(config, "zero_expert_num", 0)
        for config in parts
        for n in [getattr(config, "n_routed_experts", None)]
        if isinstance(n, int)
    }
    model_type = next((c.model_type for c in parts if c.model_type in REFUSED_FAMILIES), None)
    if model_type is None:
        model_type = parts[0].model_type if parts else type(model).__name__
    return model_type, {n for n in counts if isinstance(n, int) and n > 1}


def _run(model: nn.Module, counts: set[int]) -> None:
    # A length that is no expert count: a top-k over positions must not look like one over experts.
    length = next(n for n in range(5, 5 + len(counts) + 1) if n not in counts)
    device = next(model.parameters()).device
    model(input_ids=torch.arange(3, 3 + length, device=device)[None])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode, without gradients; each module has its own mode back afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


class _Spy(TorchFunctionMode):
    """Notes `(E, k)` of each top-k over a number of experts in the call that is on top of the module stack."""

    def __init__(self, counts: set[int], stack: list[list[tuple[int, int]]]):
        super().__init__()
        self.counts, self.stack = counts, stack

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_topk(func) and self.stack:
            scores, k, dim = topk_arguments(args, kwargs)
            if dim == scores.dim() - 1 and scores.shape[-1] in self.counts:
                self.stack[-1].append((scores.shape[-1], k))
        return func(*args, **kwargs)


def _watch_topk(
    model: nn.Module, counts: set[int], probe: Callable[[], Any]
) -> dict[nn.Module, list[list[tuple[int, int]]]]:
    """For each module whose own forward calls top-k over experts: the calls `(E, k)` of each of its forwards."""
    stack: list[list[tuple[int, int]]] = []
    found: dict[nn.Module, list[list[tuple[int, int]]]] = {}

    def enter(module: nn.Module, args: Any) -> None:
        stack.append([])

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if calls := stack.pop():
            found.setdefault(module, []).append(calls)

    handles = []
    try:
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))
        with evaluating(model), _Spy(counts, stack):
            probe()
    finally:
        for handle in handles:
            handle.remove()
        reshard(model)
    return found


def reshard(model: nn.Module) -> None:
    """Give FSDP2 its shards back: without a backward, the root's parameters stay whole after a forward, and an
    optimizer that is made from them then would update copies."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def layer_number(name: str) -> int | None:
    """The global layer number in a module's qualified name: its first integer part, as engines count too."""
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(match.group(1)) if match else None


def _router(model_type: str, name: str, layer: int, module: nn.Module, forwards: list[list[tuple[int, int]]]) -> Router:
    if len(forwards) != 1:
        raise UnreplayableRouterError(
            model_type, f"one forward calls the router {name!r} {len(forwards)} times, so a token has several routes"
        )
    (calls,) = forwards
    num_experts, top_k = calls[-1]
    num_calls = sum(n == num_experts for n, _ in calls)
    return Router(name, module, layer, num_experts, top_k, num_calls)


def _layers_with_experts(named_modules: Iterable[tuple[str, nn.Module]]) -> set[int]:
    found = set()
    for name, module in named_modules:
        layer = layer_number(name)
        if layer is not None and (name.endswith(".experts") or "Experts" in type(module).__name__):
            found.add(layer)
    return found


def _check_complete(model_type: str, model: nn.Module, routers: list[Router]) -> None:
    if not routers:
        raise UnreplayableRouterError(
            model_type, "its forward makes no top-k over its experts, so there is no choice that could be replaced"
        )
    layers = [router.layer for router in routers]
    twice = sorted({layer for layer in layers if layers.count(layer) > 1})
    if twice:
        names = [router.name for router in routers if router.layer == twice[0]]
        raise UnreplayableRouterError(model_type, f"layer {twice[0]} has {len(names)} routers: {', '.join(names)}")
    without = sorted(_layers_with_experts(model.named_modules()) - set(layers))
    if without:
        raise UnreplayableRouterError(
            model_type, f"layers {without} have experts, but their forward makes no top-k over them"
        )
    shapes = {(router.num_experts, router.top_k) for router in routers}
    if len(shapes) > 1:
        raise UnreplayableRouterError(
            model_type, f"its layers choose differently: (experts, top_k) is one of {sorted(shapes)}"
        )
