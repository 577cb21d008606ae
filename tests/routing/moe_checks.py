"""What replay must do for a model, checked on one model at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from tests.routing.moe_families import VOCABULARY, build
from trl_support_replay.routing import RouteBatch, RouterReplay

BATCH, WIDTH = 2, 10


@dataclass
class Step:
    """Logits and gradients of one training step."""

    logits: torch.Tensor
    grads: dict[str, torch.Tensor]

    def __eq__(self, other):
        return torch.equal(self.logits, other.logits) and self.same_grads(other)

    def same_grads(self, other):
        return self.grads.keys() == other.grads.keys() and all(
            torch.equal(grad, other.grads[name]) for name, grad in self.grads.items()
        )


def tokens(batch=BATCH, width=WIDTH, seed=1):
    return torch.randint(3, VOCABULARY, (batch, width), generator=torch.Generator().manual_seed(seed))


def loss_of(logits, ids):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def train_step(model, ids) -> Step:
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=ids).logits
    loss_of(logits, ids).backward()
    return Step(logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def random_routes(replay, batch=BATCH, width=WIDTH, seed=2):
    """`[B, S, L, k]` distinct experts, drawn without looking at the model."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand(batch, width, len(replay.layers), replay.num_experts, generator=generator)
    return draw.topk(replay.top_k, dim=-1).indices


def record(model, replay, ids):
    """`[B, S, L, k]` the experts that the live routers choose."""
    with replay.record() as recording, torch.no_grad():
        model(input_ids=ids)
    return recording.experts(len(ids))


def router_weights(model, replay):
    """For each router, the names of the parameters that give its scores (a shared expert may add a row)."""
    named = [
        name
        for name, p in model.named_parameters()
        if p.dim() == 2
        and p.shape[0] - replay.num_experts in (0, 1)
        and re.search(r"gate\b|router|classifier|ffn", name)
    ]
    prefix = [re.match(r".*?\.\d+\.", router.name).group() for router in replay.routers]
    return [[name for name in named if name.startswith(p)] for p in prefix]


def attributes(model):
    """Every attribute of every module instance, hooks included, by identity."""
    return {
        name: {
            key: list(value) if isinstance(value, dict) else value if isinstance(value, bool) else id(value)
            for key, value in vars(module).items()
        }
        for name, module in model.named_modules()
    }


@dataclass
class FamilyReport:
    """Outcome of every check on one family; all true when it is replayed exactly."""

    router: str
    layers: tuple[int, ...]
    recording_changes_nothing: bool
    records_in_token_order: bool
    replay_is_bitwise: bool
    forced_routes_change_logits: bool
    forced_routes_change_grads: bool
    router_weights_get_gradient: bool
    checkpointing_is_bitwise: bool
    reentrant_checkpointing_is_bitwise: bool
    leaves_nothing_behind: bool

    def failures(self):
        return [name for name, value in vars(self).items() if value is False]


def check_family(model_type, dtype=torch.float32, experts="eager") -> FamilyReport:
    model = build(model_type, dtype=dtype, experts=experts)
    before = attributes(model)
    replay = RouterReplay(model)
    clean = [attributes(model) == before]
    ids = tokens()
    native = train_step(model, ids)
    with replay.record() as recording:
        recorded = train_step(model, ids)
    own = recording.experts(BATCH)

    alone = []
    for row in ids:
        with replay.record() as single, torch.no_grad():
            model(input_ids=row[None])
        alone.append(single.experts(1)[0])

    with replay.scope(RouteBatch(own)) as scope:
        replayed = train_step(model, ids)
    metrics = scope.metrics
    agreed = metrics.agreement == 1 and metrics.order_mismatch == 0 and metrics.captured == ids.numel()

    other = RouteBatch(random_routes(replay))
    with replay.scope(other):
        forced = train_step(model, ids)
    checkpointed = {}
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        before = attributes(model)
        with replay.scope(other):
            checkpointed[reentrant] = train_step(model, ids)
        clean.append(attributes(model) == before)
        model.gradient_checkpointing_disable()
    weights = router_weights(model, replay)
    return FamilyReport(
        router=type(replay.routers[0].module).__name__,
        layers=replay.layers,
        recording_changes_nothing=recorded == native,
        records_in_token_order=torch.equal(torch.stack(alone), own),
        replay_is_bitwise=replayed == native and agreed,
        forced_routes_change_logits=not torch.allclose(forced.logits, native.logits, atol=1e-3),
        forced_routes_change_grads=not forced.same_grads(native),
        router_weights_get_gradient=all(
            names and all(bool(forced.grads[name].abs().sum() > 0) for name in names) for names in weights
        ),
        checkpointing_is_bitwise=checkpointed[False] == forced,
        reentrant_checkpointing_is_bitwise=checkpointed[True] == forced,
        leaves_nothing_behind=all(clean) and train_step(model, ids) == native,
    )
