"""Routes in a schedule of one process: what is replayed, what is refused, and what is left behind."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny_gpt
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from tiny_gpt import EXPERTS, WIDTH

from trl_support_replay.megatron import MegatronRouterReplay
from trl_support_replay.megatron.core import check_version, megatron_version
from trl_support_replay.routing import RouteBatch, RouterReplayError, UnreplayableRouterError
from trl_support_replay.traces import RoutedExperts, RoutesError

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
    with MegatronRouterReplay(model).schedule(forward_step, some_routes().__getitem__) as step:
        losses, _ = step(iter([tiny_gpt.tokens(0)]), model)
    with pytest.raises(RouterReplayError, match="Backward of micro-batch 0 runs after its routes were closed"):
        losses.mean().backward()


# What does not fit


def test_a_model_that_runs_without_its_micro_batch() -> None:
    model = build()
    with MegatronRouterReplay(model).schedule(forward_step, some_routes().__getitem__):
        with pytest.raises(RouterReplayError, match="runs in a forward that no micro-batch of the schedule is known"):
            run(forward_step, model)


def test_backward_in_a_forward_only_schedule() -> None:
    model = build(**FULL)
    with pytest.raises(RouterReplayError, match="runs in a backward that no micro-batch of the schedule is known for"):
        with MegatronRouterReplay(model).schedule(forward_step, some_routes().__getitem__, forward_only=True) as step:
            run(step, model)


def test_a_model_that_is_not_the_replays() -> None:
    model, other = build(), build()
    with pytest.raises(RouterReplayError, match="a GPTModel that is not among the 1 model chunks"):
        with MegatronRouterReplay(model).schedule(forward_step, some_routes().__getitem__) as step:
            run(step, other)


def test_a_forward_that_runs_the_model_twice() -> None:
    model = build()

    def twice(iterator: Any, module: Any) -> Any:
        ids, _ = batch = next(iterator)
        forward_step(iter([batch]), module)
        return forward_step(iter([batch]), module)

    with pytest.raises(RouterReplayError, match="took its routes 2 times in the forward of micro-batch 0"):
        with MegatronRouterReplay(model).schedule(twice, some_routes().__getitem__) as step:
            run(step, model)


def duplicate(routes: torch.Tensor) -> torch.Tensor:
    routes[1, 3, 1] = 5
    return routes


def beyond(routes: torch.Tensor) -> torch.Tensor:
    routes[0, 0, 0, 0] = EXPERTS
    return routes


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda r: r[:, :-2], RouterReplayError, "routes 32 tokens of micro-batch 0, whose routes are for 28 on this"),
        (lambda r: r[:, :, :1], RouterReplayError, "routes of 1 layers, the model has experts in 2 of its 2 layers"),
        (lambda r: r[..., :1], RouterReplayError, "routes of 1 experts a token, moe_router_topk is 2"),
        (beyond, RouterReplayError, "routes to 9 experts (ids 0 to 8), num_moe_experts is 8"),
        (duplicate, RoutesError, "sample 1, position 3, layer column 1: one expert twice in [5, 5]"),
        (lambda r: r.to(torch.int8) - 4, RoutesError, "at a captured position is negative"),
        (lambda r: r.float(), RoutesError, "are not integers [batch, sequence, layers, top_k]"),
    ],
)
def test_routes_that_do_not_fit(
    change: Callable[[torch.Tensor], torch.Tensor], error: type[Exception], message: str
) -> None:
    model = build()
    routes = change(some_routes()[0])
    with pytest.raises(error, match=re.escape(message)):
        with MegatronRouterReplay(model).schedule(forward_step, lambda i: routes) as step:
            run(step, model, 1)


def test_routes_recorded_for_other_layers() -> None:
    experts = some_routes()[0][0].numpy()
    sample = RoutedExperts(experts, num_experts=EXPERTS, layers=(1, 2))
    batch = RouteBatch.from_samples([sample, sample], starts=[0, 0], width=WIDTH)
    model = build()
    with pytest.raises(RouterReplayError, match=re.escape("routes of layers (1, 2), the model has experts in (0, 1)")):
        with MegatronRouterReplay(model).schedule(forward_step, lambda i: batch) as step:
            run(step, model, 1)


@pytest.mark.parametrize(
    ("change", "routes"),
    [
        ("micro-batches exchanged", lambda routes: routes[::-1]),
        ("routes of another layer", lambda routes: [batch.flip(2) for batch in routes]),
        ("rows exchanged", lambda routes: [batch.flip(0) for batch in routes]),
        ("shifted by one position", lambda routes: [batch.roll(1, dims=1) for batch in routes]),
    ],
)
def test_wrong_routes_give_other_losses(change: str, routes: Callable[[Any], Any]) -> None:
    model = build()
    right = some_routes()
    results = []
    for each in (right, routes(right)):
        with MegatronRouterReplay(model).schedule(forward_step, list(each).__getitem__) as step:
            results.append((run(step, model), grads(model)["decoder.layers.0.mlp.router.weight"]))
    (losses, grad), (other_losses, other_grad) = results
    assert max(abs(a / b - 1) for a, b in zip(losses, other_losses, strict=True)) > 1e-4
    assert ((grad - other_grad).abs().max() / grad.abs().max()).item() > 0.1


# Settings


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("moe_router_fusion", True, "the fused kernel chooses experts itself"),
        ("moe_router_load_balancing_type", "sinkhorn", "without the router's top-k"),
        ("moe_router_load_balancing_type", ["aux_loss", "quantile_balancing"], "without the router's top-k"),
        ("mtp_num_layers", 1, "no routes for multi-token prediction layers"),
        ("overlap_moe_expert_parallel_comm", True, "run interleaved"),
        ("moe_router_force_load_balancing", True, "by random ones"),
        ("moe_router_force_biased", 0.0, "random biases"),
        ("moe_expert_capacity_factor", 1.0, "drops tokens"),
        ("moe_expert_rank_capacity_factor", 1.0, "drops tokens"),
        ("cuda_graph_impl", "local", "a captured graph repeats"),
    ],
)
def test_settings_that_are_refused(setting: str, value: Any, message: str) -> None:
    model = build()
    setattr(model.config, setting, value)
    with pytest.raises(UnreplayableRouterError, match=re.escape(f"with {setting}={value!r}") + f".*{message}"):
        MegatronRouterReplay(model)


def test_an_interleaved_pipeline_of_two_stages_needs_unbatched_p2p() -> None:
    model = build()
    model.config.pipeline_model_parallel_size = 2
    model.config.batch_p2p_comm = True
    MegatronRouterReplay(model)
    with pytest.raises(UnreplayableRouterError, match="set overlap_p2p_comm=True and batch_p2p_comm=False"):
        MegatronRouterReplay([model, model])
    model.config.batch_p2p_comm = False
    assert MegatronRouterReplay([model, model]).layers == (0, 1, 0, 1)


def test_models_without_routers_and_without_chunks() -> None:
    with pytest.raises(UnreplayableRouterError, match="num_moe_experts is not set"):
        MegatronRouterReplay(build(num_moe_experts=None, moe_ffn_hidden_size=None))
    with pytest.raises(RouterReplayError, match="no model chunk"):
        MegatronRouterReplay([])


def test_layer_numbers_count_dense_layers() -> None:
    replay = MegatronRouterReplay(build(num_layers=4, moe_layer_freq=[0, 1, 0, 1]))
    assert replay.layers == (1, 3)
    assert MegatronRouterReplay(build(num_layers=4, moe_layer_freq=3)).layers == (0, 3)


def test_a_router_in_a_layer_that_is_called_dense() -> None:
    model = build(num_layers=2, moe_layer_freq=[1, 1])
    model.config.moe_layer_freq = [0, 1]
    with pytest.raises(RouterReplayError, match=re.escape("has layer number 0 (from 0), but moe_layer_freq=[0, 1]")):
        MegatronRouterReplay(model)
    model.config.moe_layer_freq = [1]
    with pytest.raises(RouterReplayError, match="moe_layer_freq has 1 entries, num_layers is 2"):
        MegatronRouterReplay(model)


def test_without_megatron_core() -> None:
    code = "import sys; sys.modules['megatron.core'] = None; import trl_support_replay.megatron"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "ImportError: trl_support_replay.megatron needs megatron-core: pip install" in result.stderr


def test_versions() -> None:
    check_version(megatron_version)
    for known in ("0.16.0", "0.16.1", "0.17.1", "0.19.2"):
        check_version(known)
    for unknown in ("0.15.3", "0.16.0rc0", "0.20.0", "1.0"):
        with pytest.raises(ImportError, match=re.escape(f"megatron-core {unknown} is installed")):
            check_version(unknown)
