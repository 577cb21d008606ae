"""Routes in a schedule of one process: what is replayed, and what is left behind."""

from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router_replay import RouterReplay

from tests.megatron import tiny_gpt
from tests.megatron.tiny_gpt import EXPERTS, WIDTH
from tests.megatron.tiny_schedule import (
    BATCH,
    FULL,
    assert_same,
    build,
    core_pattern,
    flat,
    forward_step,
    grads,
    routers,
    run,
    some_routes,
    watch,
)
from trl_support_replay.megatron import MegatronRouterReplay
from trl_support_replay.routing import RouteBatch, RouterReplayError
from trl_support_replay.traces import RoutedExperts

RECOMPUTE = {
    "full": FULL,
    "block": {**FULL, "recompute_method": "block"},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 1.5},
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        {"moe_router_num_groups": 4, "moe_router_group_topk": 1},
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1},
        {"moe_shared_expert_intermediate_size": 32},
    ],
    ids=lambda settings: "-".join(settings) or "softmax",
)
def test_losses_and_gradients_are_those_of_core_replay(settings: dict[str, Any]) -> None:
    routes = some_routes()
    reference = build(moe_enable_routing_replay=True, **settings)
    want = run(core_pattern(routes, clear=True), reference)

    model = build(**settings)
    seen = watch(model)
    with MegatronRouterReplay(model).schedule(forward_step, routes.__getitem__) as step:
        have = run(step, model)
    assert have == want
    assert_same(grads(model), grads(reference))
    assert len(seen) == 4
    for call, (layer, experts) in enumerate(seen):
        assert torch.equal(experts, flat(routes[call // 2], layer))


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_layers_that_run_again_take_the_same_experts(recompute: str) -> None:
    routes = some_routes()
    plain, model = build(), build(**RECOMPUTE[recompute])
    seen = watch(model)
    for each in (plain, model):
        with MegatronRouterReplay(each).schedule(forward_step, routes.__getitem__) as step:
            run(step, each)
    assert_same(grads(model), grads(plain))
    assert len(seen) == (6 if recompute == "block" else 8)


def test_micro_batches_that_are_not_all_recomputed_and_run_backward_in_any_order() -> None:
    routes = some_routes(3)
    data = [tiny_gpt.tokens(seed, BATCH) for seed in range(3)]
    want = build()
    with MegatronRouterReplay(want).schedule(forward_step, routes.__getitem__) as step:
        torch.stack([step(iter([batch]), want)[0].mean() for batch in data]).sum().backward()

    model = build(**FULL)
    with MegatronRouterReplay(model).schedule(forward_step, routes.__getitem__) as step:
        losses = []
        for i, batch in enumerate(data):
            model.config.recompute_granularity = "full" if i else None
            losses.append(step(iter([batch]), model)[0].mean())
        for i in (2, 0, 1):
            losses[i].backward()
    for name, grad in grads(want).items():
        torch.testing.assert_close(model.get_parameter(name).grad, grad, rtol=1e-5, atol=1e-8)


def test_routes_of_recorded_samples_with_live_positions_and_padding() -> None:
    """The last token has no recorded route; the row is padded to the width of the batch."""
    rng = torch.Generator().manual_seed(0)
    samples = []
    for length in (WIDTH - 4, WIDTH - 1):
        experts = torch.rand(length - 1, 2, EXPERTS, generator=rng).topk(2).indices
        samples.append(RoutedExperts.from_prefix(experts.numpy(), length, num_experts=EXPERTS))
    batch = RouteBatch.from_samples(samples, starts=[0, 0], width=WIDTH)
    results = {}
    for name, settings in {"plain": {}, **RECOMPUTE}.items():
        model = build(**settings)
        seen = watch(model)
        with MegatronRouterReplay(model).schedule(forward_step, lambda i: batch) as step:
            losses = run(step, model, 1)
        results[name] = losses, grads(model)
        assert step.metrics.captured == sum(len(sample) - 1 for sample in samples)
        assert step.metrics.uncaptured == 2
        captured = batch.captured.T.flatten()
        first_forward: dict[int, torch.Tensor] = {}
        for layer, experts in seen:
            assert torch.equal(experts[captured], flat(batch.experts, layer)[captured])
            assert torch.equal(experts, first_forward.setdefault(layer, experts))
    live_model = build()
    live = watch(live_model)
    run(forward_step, live_model, 1)
    uncaptured = ~(batch.captured | batch.padding).T.flatten()
    # In the first layer nothing has been replayed before the router, so its own choice is the unreplayed one.
    assert torch.equal(live[0][1][uncaptured], first_forward[0][uncaptured])
    for name in RECOMPUTE:
        assert results[name][0] == results["plain"][0]
        assert_same(results[name][1], results["plain"][1])


def test_agreement_with_the_live_router() -> None:
    model = build()
    seen = watch(model)
    run(forward_step, model, 1, forward_only=True)
    own = torch.stack([experts.view(WIDTH, BATCH, 2).transpose(0, 1) for _, experts in seen], dim=2)
    with MegatronRouterReplay(model).schedule(forward_step, lambda i: own, forward_only=True) as step:
        run(step, model, 1, forward_only=True)
    assert step.metrics.agreement == 1.0
    changed = own.clone()
    changed[:, :, 0] = (changed[:, :, 0] + 1) % EXPERTS
    with MegatronRouterReplay(model).schedule(forward_step, lambda i: changed, forward_only=True) as step:
        run(step, model, 1, forward_only=True)
    overlap = (changed[:, :, 0, :, None] == own[:, :, 0, None, :]).sum().item() / own[:, :, 0].numel()
    assert step.metrics.agreement_per_layer[0] == pytest.approx(overlap)


# What is left behind


def state(model: GPTModel) -> list[tuple[set[str], int]]:
    return [(set(vars(router)), len(router._forward_pre_hooks)) for router in routers(model)]


def test_a_forward_only_pass_leaves_nothing_for_the_next_step() -> None:
    train, score = some_routes(first_seed=0), some_routes(first_seed=50)
    fresh = build(**FULL)
    with MegatronRouterReplay(fresh).schedule(forward_step, train.__getitem__) as step:
        run(step, fresh)

    model = build(**FULL)
    before = state(model)
    replay = MegatronRouterReplay(model)
    with replay.schedule(forward_step, score.__getitem__, forward_only=True) as step:
        run(step, model, forward_only=True)
    assert state(model) == before
    with replay.schedule(forward_step, train.__getitem__) as step:
        run(step, model)
    assert state(model) == before
    assert_same(grads(model), grads(fresh))


def test_core_replay_leaks_routes_from_a_forward_only_pass_into_the_next_step() -> None:
    """Why the routes do not go through megatron-core's own queue: wrong gradients, and no error."""
    train, score = some_routes(first_seed=0), some_routes(first_seed=50)
    model = build(**FULL, moe_enable_routing_replay=True)
    run(core_pattern(train, clear=True), model)
    want = grads(model)
    run(core_pattern(score, clear=True), model, forward_only=True)
    run(core_pattern(train, clear=False), model)
    router_weight = "decoder.layers.0.mlp.router.weight"
    assert not torch.allclose(grads(model)[router_weight], want[router_weight], rtol=0.1)

    with pytest.raises(RouterReplayError, match="RouterReplay still holds router_replay_action, target_topk_idx"):
        with MegatronRouterReplay(model).schedule(forward_step, train.__getitem__):
            raise AssertionError("opened on dirty state")
    RouterReplay.clear_global_indices()
    RouterReplay.clear_global_router_replay_action()
    with MegatronRouterReplay(model).schedule(forward_step, train.__getitem__) as step:
        run(step, model)
    assert_same(grads(model), want)
    assert all(isinstance(router.router_replay, RouterReplay) for router in routers(model))


@pytest.mark.parametrize("fails_in", ["forward", "loss", "backward"])
def test_an_exception_in_the_middle_of_a_schedule_leaves_nothing(fails_in: str) -> None:
    routes = some_routes()
    model = build(**FULL, moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")
    before = state(model)
    calls = iter(range(10))

    def fail(*args: Any) -> Any:
        raise MemoryError("out of memory")

    def failing(iterator: Any, module: Any) -> Any:
        second = next(calls) == 1
        if second and fails_in == "forward":
            fail()
        losses, loss_function = forward_step(iterator, module)
        if second and fails_in == "backward":
            losses.register_hook(fail)
        return losses, fail if second and fails_in == "loss" else loss_function

    replay = MegatronRouterReplay(model)
    with pytest.raises(MemoryError), replay.schedule(failing, routes.__getitem__) as step:
        run(step, model)
    assert state(model) == before
    with replay.schedule(forward_step, routes.__getitem__) as step:
        run(step, model)
    have = grads(model)
    fresh = build(**FULL, moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")
    with MegatronRouterReplay(fresh).schedule(forward_step, routes.__getitem__) as step:
        run(step, fresh)
    assert_same(have, grads(fresh))


def test_two_models_in_one_process_have_routes_of_their_own() -> None:
    policy_routes, other_routes = some_routes(first_seed=0), some_routes(first_seed=50)
    alone = build(**FULL)
    with MegatronRouterReplay(alone).schedule(forward_step, policy_routes.__getitem__) as step:
        run(step, alone)

    policy, other = build(**FULL), build(**FULL)
    seen = watch(other)
    with MegatronRouterReplay(policy).schedule(forward_step, policy_routes.__getitem__) as step:
        with MegatronRouterReplay(other).schedule(forward_step, other_routes.__getitem__, True) as other_step:
            run(other_step, other, forward_only=True)
        run(step, policy)
    assert_same(grads(policy), grads(alone))
    assert [torch.equal(experts, flat(other_routes[i // 2], layer)) for i, (layer, experts) in enumerate(seen)] == (
        [True] * 4
    )
    assert not RouterReplay.global_router_replay_instances


def test_two_schedules_on_one_model_are_refused() -> None:
    model = build()
    replay = MegatronRouterReplay(model)
    with replay.schedule(forward_step, some_routes().__getitem__) as step:
        with pytest.raises(RouterReplayError, match="already replays routes for another schedule"):
            with MegatronRouterReplay(model).schedule(forward_step, some_routes().__getitem__):
                raise AssertionError("opened twice")
        run(step, model)


def test_backward_after_the_schedule_is_refused() -> None:
    model = build(**FULL)
    with pytest.raises(RouterReplayError, match="1 micro-batches had no backward .*micro-batch 0 of model chunk 0"):
        with MegatronRouterReplay(model).schedule(forward_step, some_routes().__getitem__) as step:
            losses, _ = step(iter([tiny_gpt.tokens(0)]), model)
    with pytest.raises(RouterReplayError, match="Backward of micro-batch 0 runs after its routes were closed"):
        losses.mean().backward()
