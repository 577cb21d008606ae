"""A model split over ranks against the same model in one process: losses, gradients, and the experts of every call."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router import TopKRouter

from tests.megatron import tiny_gpt
from tests.megatron.tiny_gpt import PARALLEL_SIZES, TOP_K, WIDTH
from trl_support_replay.megatron import MegatronRouterReplay, routers, schedule
from trl_support_replay.megatron.local_routes import LocalRoutes, local_routes
from trl_support_replay.megatron.routers import find_chunks
from trl_support_replay.megatron.sequence_shard import SequenceShard
from trl_support_replay.routing import RouteBatch

MICRO_BATCHES, BATCH = 4, 2

# What describes the model, and not how it is run.
MODEL_SETTINGS = (
    "num_layers",
    "moe_layer_freq",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
)


@dataclass
class Run:
    """What one run of a schedule did on this rank.

    Attributes:
        losses: of each micro-batch, on the last pipeline stage.
        grads: by global parameter name.
        expert_bias: by layer, `[E]`, after Megatron's own update from the counted tokens.
        calls: `(layer, micro-batch, experts)` of each router call, `experts` `[N, k]` sorted; the micro-batch is
            that of the n-th forward or the n-th repetition.
    """

    losses: list[float] = field(default_factory=list)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    expert_bias: dict[int, torch.Tensor] = field(default_factory=dict)
    calls: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)


def routes_of_run(num_layers: int) -> list[torch.Tensor]:
    return [tiny_gpt.routes(100 + i, num_layers, BATCH) for i in range(MICRO_BATCHES)]


def run_schedule(
    settings: dict[str, Any],
    routes: list[torch.Tensor],
    padding: int = 0,
) -> tuple[Run, list[Any]]:
    """One forward-backward pass, with Megatron's own data-parallel wrapper and gradient reduction.

    Args:
        settings: of `TransformerConfig`; those of `PARALLEL_SIZES` say how it is split.
        routes: of each micro-batch.
        padding: positions at the end of each row that are padding, and not in the loss.
    """
    sizes = {name: settings.get(name, default) for name, default in PARALLEL_SIZES.items()}
    tiny_gpt.initialize_parallel(**sizes)
    cfg = tiny_gpt.config(**settings)
    cfg.finalize_model_grads_func = finalize_model_grads
    chunks = tiny_gpt.build_chunks(cfg)
    wrapped = [DistributedDataParallel(cfg, DistributedDataParallelConfig(), chunk) for chunk in chunks]
    run = Run()
    _watch_routers(chunks, run)
    # The positions are cut by other code than the one that is tested.
    num_context, context_rank = sizes["context_parallel_size"], parallel_state.get_context_parallel_rank()

    def cut(values: torch.Tensor) -> torch.Tensor:
        return tiny_gpt.zig_zag(values, [WIDTH], num_context, context_rank)

    def forward_step(iterator: Any, model: Any, *_: Any) -> Any:
        ids, labels = map(cut, next(iterator))
        positions = cut(torch.arange(WIDTH).expand(BATCH, WIDTH))
        losses = model(ids, positions, tiny_gpt.causal_mask(WIDTH), labels=labels)

        def loss_function(losses: torch.Tensor) -> Any:
            loss = losses[positions < WIDTH - padding].sum() / (BATCH * (WIDTH - padding))
            total = loss.detach().clone()
            torch.distributed.all_reduce(total, group=parallel_state.get_context_parallel_group())
            run.losses.append(total.item())
            return loss, {}

        return losses, loss_function

    replay = MegatronRouterReplay(wrapped)
    data = [tiny_gpt.tokens(seed, BATCH) for seed in range(MICRO_BATCHES)]
    is_padding = torch.arange(WIDTH).expand(BATCH, WIDTH) >= WIDTH - padding
    batches = [RouteBatch(batch, padding=is_padding) for batch in routes]
    with replay.schedule(forward_step, batches.__getitem__) as step:
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(data) for _ in chunks] if len(chunks) > 1 else iter(data),
            model=wrapped if len(chunks) > 1 else wrapped[0],
            num_microbatches=MICRO_BATCHES,
            seq_length=WIDTH,
            micro_batch_size=BATCH,
            forward_only=False,
        )
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            run.grads[tiny_gpt.global_name(chunk, name)] = parameter.main_grad.clone()
        for module in chunk.modules():
            if isinstance(module, TopKRouter) and module.enable_expert_bias:
                run.expert_bias[module.layer_number - 1] = module.expert_bias.clone()
    return run, chunks


def _watch_routers(chunks: list[Any], run: Run) -> None:
    seen: dict[tuple[int, bool], int] = {}

    def watch(router: TopKRouter, args: Any, output: Any) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        key = (router.layer_number - 1, in_backward)
        index = seen.get(key, 0)
        seen[key] = index + 1
        run.calls.append((key[0], index, output[1].nonzero()[:, 1].view(-1, TOP_K)))

    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module.register_forward_hook(watch)


def wrong_calls(
    run: Run, chunks: list[Any], routes: list[torch.Tensor], with_experts: list[int], padding: int = 0
) -> int:
    """Router calls with experts that are not those of their micro-batch and layer, cut by code of this file.

    At padding, any experts will do.
    """
    routes = [batch.long() for batch in routes]
    for batch in routes:
        batch[:, WIDTH - padding :] = -1
    context = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    tensor = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    wrong = 0
    for layer, index, experts in run.calls:
        want = routes[index][:, :, with_experts.index(layer)]
        want = tiny_gpt.zig_zag(want.transpose(1, 2), [WIDTH], *context).permute(2, 0, 1)
        if chunks[0].config.sequence_parallel:
            want = want.chunk(tensor[0])[tensor[1]]
        want = want.reshape(-1, TOP_K).sort().values
        wrong += not torch.equal(want, torch.where(want < 0, -1, experts))
    return wrong


@dataclass
class Parity:
    """How far this rank's run is from the one-process run.

    Attributes:
        loss: largest relative difference of a micro-batch's loss; 0 where this rank has no losses.
        grad: largest relative difference of a parameter's gradient, and the parameter.
        bias: number of experts whose bias differs.
        wrong_calls, num_calls: router calls.
        num_losses, num_grads: what was compared.
        layers: whose routers are on this rank, chunk by chunk.
    """

    loss: float
    grad: tuple[float, str]
    bias: int
    wrong_calls: int
    num_calls: int
    num_losses: int
    num_grads: int
    layers: list[list[int]]


def compare(settings: dict[str, Any], padding: int = 0) -> Parity:
    """`settings` against the same model in one process."""
    frequency = settings.get("moe_layer_freq", 1)
    num_layers = settings.get("num_layers", 2)
    with_experts = [i for i in range(num_layers) if frequency == 1 or frequency[i]]
    routes = routes_of_run(len(with_experts))
    model = {name: settings[name] for name in MODEL_SETTINGS if name in settings}
    alone, _ = run_schedule(model, routes, padding)
    split, chunks = run_schedule(settings, routes, padding)
    worst = (0.0, "")
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            whole_name = tiny_gpt.global_name(chunk, name)
            want = tiny_gpt.local_part(name, parameter, alone.grads[whole_name])
            difference = (split.grads[whole_name] - want).abs().max() / alone.grads[whole_name].abs().max()
            worst = max(worst, (difference.item(), whole_name))
    loss = max((abs(a / b - 1) for a, b in zip(split.losses, alone.losses, strict=False)), default=0.0)
    return Parity(
        loss=loss,
        grad=worst,
        bias=sum(int((bias != alone.expert_bias[layer]).sum()) for layer, bias in split.expert_bias.items()),
        wrong_calls=wrong_calls(split, chunks, routes, with_experts, padding),
        num_calls=len(split.calls),
        num_losses=len(split.losses),
        num_grads=len(split.grads),
        layers=[[router.layer for router in chunk.routers] for chunk in find_chunks(chunks)],
    )


def compare_all(cases: dict[str, dict[str, Any]]) -> dict[str, Parity]:
    """Several cases in one start of the processes; "padding" among the settings is that of `run_schedule`."""
    results = {}
    for name, settings in cases.items():
        settings = dict(settings)
        padding = settings.pop("padding", 0)
        results[name] = compare(settings, padding)
    return results


def compare_broken(settings: dict[str, Any], fault: str) -> Parity:
    """The same with a fault in how routes are cut, which has to show."""
    with mock.patch.object(schedule, "local_routes", partial(_cut_wrongly, fault)):
        return compare(settings)


def _cut_wrongly(fault: str, batch: RouteBatch, columns: Any, shard: SequenceShard, **kwargs: Any) -> LocalRoutes:
    if fault == "halves swapped":
        shard = replace(shard, tensor_rank=shard.tensor_size - 1 - shard.tensor_rank)
    elif fault == "no zig-zag":
        order = torch.cat([SequenceShard(shard.context_size, c).positions([WIDTH]) for c in range(shard.context_size)])
        batch = RouteBatch(batch.experts[:, order.argsort()])
    local = local_routes(batch, columns, shard, **kwargs)
    if fault == "not transposed":
        by_row = local.experts.view(-1, BATCH, *local.experts.shape[1:]).transpose(0, 1).reshape(local.experts.shape)
        local = replace(local, experts=by_row)
    return local


def compare_unchecked(settings: dict[str, Any]) -> Parity:
    """The same with settings that `MegatronRouterReplay` refuses."""
    with mock.patch.object(routers, "check_replayable"):
        return compare(settings)
