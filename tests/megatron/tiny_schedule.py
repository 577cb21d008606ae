"""A schedule of one process over a tiny model, and what its routers chose."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from tests.megatron import tiny_gpt
from tests.megatron.tiny_gpt import WIDTH

BATCH = 2
Step = Callable[..., Any]


def build(**settings: Any) -> GPTModel:
    RouterReplay.clear_global_router_replay_instances()
    return tiny_gpt.build_chunks(tiny_gpt.config(**settings))[0]


def forward_step(iterator: Iterator[Any], model: GPTModel) -> Any:
    ids, labels = next(iterator)
    positions = torch.arange(ids.shape[1])[None].expand_as(ids)
    losses = model(ids, positions, tiny_gpt.causal_mask(ids.shape[1]), labels=labels)
    return losses, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})


def run(step: Step, model: GPTModel, num_micro_batches: int = 2, forward_only: bool = False) -> list[float]:
    """Losses of one pass of Megatron's own schedule; gradients are in the model."""
    model.zero_grad(set_to_none=True)
    reports = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter([tiny_gpt.tokens(seed, BATCH) for seed in range(num_micro_batches)]),
        model=model,
        num_microbatches=num_micro_batches,
        seq_length=WIDTH,
        micro_batch_size=BATCH,
        forward_only=forward_only,
    )
    return [report["loss"].item() for report in reports]


def grads(model: GPTModel) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert have.keys() == want.keys()
    different = [name for name in want if not torch.equal(have[name], want[name])]
    assert not different


def routers(model: GPTModel) -> list[TopKRouter]:
    return [module for module in model.modules() if isinstance(module, TopKRouter)]


def watch(model: GPTModel) -> list[tuple[int, torch.Tensor]]:
    """`(layer, experts)` of each router call from here on, `experts` `[N, k]` sorted."""
    seen: list[tuple[int, torch.Tensor]] = []
    for router in routers(model):
        router.register_forward_hook(
            lambda module, args, out: seen.append((module.layer_number - 1, chosen_by(out[1], module.topk)))
        )
    return seen


def chosen_by(routing_map: torch.Tensor, top_k: int) -> torch.Tensor:
    return routing_map.nonzero()[:, 1].view(-1, top_k)


def flat(routes: torch.Tensor, layer: int) -> torch.Tensor:
    """`[N, k]` as a router sees them, ascending."""
    return routes[:, :, layer].transpose(0, 1).flatten(0, 1).long().sort().values


def some_routes(num_micro_batches: int = 2, num_layers: int = 2, first_seed: int = 0) -> list[torch.Tensor]:
    return [tiny_gpt.routes(first_seed + i, num_layers, BATCH) for i in range(num_micro_batches)]


def core_pattern(routes: list[torch.Tensor], clear: bool) -> Step:
    """The forward step that megatron-core's documentation describes for its own `RouterReplay`."""
    count = iter(range(len(routes)))

    def step(iterator: Any, model: Any) -> Any:
        micro_batch = routes[next(count)]
        layers = [micro_batch[:, :, i].transpose(0, 1).flatten(0, 1).long() for i in range(micro_batch.shape[2])]
        RouterReplay.set_replay_data(layers)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        output = forward_step(iterator, model)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        return output

    if clear:
        RouterReplay.clear_global_indices()
        RouterReplay.clear_global_router_replay_action()
    return step


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
