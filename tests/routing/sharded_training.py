"""Three training steps through forced routes, sharded over two processes or in one."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.routing.moe_checks import loss_of, tokens
from tests.routing.moe_families import NUM_EXPERTS, TOP_K, build
from trl_support_replay.routing import RouteBatch, RouterReplay

STEPS, PER_RANK, WIDTH, RANKS = 3, 2, 10, 2
LEARNING_RATE = 0.05


def step_data(step: int, num_layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`[4, S]` tokens and `[4, S, L, k]` routes. The halves of the batch use different halves of the experts."""
    ids = tokens(PER_RANK * RANKS, WIDTH, seed=10 + step)
    generator = torch.Generator().manual_seed(step)
    draw = torch.rand(*ids.shape, num_layers, NUM_EXPERTS // RANKS, generator=generator)
    routes = draw.topk(TOP_K, dim=-1).indices
    routes[PER_RANK:] += NUM_EXPERTS // RANKS
    return ids, routes


def set_checkpointing(model, kind: str) -> None:
    if kind != "none":
        model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})


def rank_steps(model, replay, rank: int, backward, update) -> None:
    """Train on this rank's half of each batch."""
    mine = slice(rank * PER_RANK, (rank + 1) * PER_RANK)
    for step in range(STEPS):
        ids, routes = step_data(step, len(replay.layers))
        with replay.scope(RouteBatch(routes[mine])) as scope:
            loss = loss_of(model(input_ids=ids[mine]).logits, ids[mine])
            backward(loss)
        assert scope.metrics.captured == ids[mine].numel()
        update()


def single_process() -> dict[str, torch.Tensor]:
    """The weights that the sharded runs must reach."""
    model = build("qwen3_moe")
    replay = RouterReplay(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    for step in range(STEPS):
        ids, routes = step_data(step, len(replay.layers))
        with replay.scope(RouteBatch(routes)):
            loss_of(model(input_ids=ids).logits, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def fsdp2(kind: str) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = build("qwen3_moe")
    set_checkpointing(model, kind)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    replay = RouterReplay(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)

    def update():
        optimizer.step()
        optimizer.zero_grad()

    rank_steps(model, replay, dist.get_rank(), lambda loss: loss.backward(), update)
    return {name: p.detach().full_tensor().clone() for name, p in model.named_parameters()}


def zero3(kind: str) -> dict[str, torch.Tensor]:
    import deepspeed

    model = build("qwen3_moe")
    set_checkpointing(model, kind)
    config = {
        "train_micro_batch_size_per_gpu": PER_RANK,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        # Nothing is small enough to stay whole.
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    assert engine.module.model.layers[1].mlp.gate.weight.numel() == 0
    replay = RouterReplay(engine.module)
    rank_steps(engine, replay, dist.get_rank(), engine.backward, engine.step)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def train(sharding: str, checkpointing: str) -> dict[str, torch.Tensor]:
    """The weights after all steps, on each rank; `sharding` is "fsdp2" or "zero3"."""
    return {"fsdp2": fsdp2, "zero3": zero3}[sharding](checkpointing)
