"""Routes, models, schedules and settings that replay refuses, each by name."""

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.megatron.tiny_gpt import EXPERTS, WIDTH
from tests.megatron.tiny_schedule import (
    FULL,
    build,
    forward_step,
    grads,
    run,
    some_routes,
)
from trl_support_replay.megatron import MegatronRouterReplay
from trl_support_replay.megatron.core import check_version, megatron_version
from trl_support_replay.routing import RouteBatch, RouterReplayError, UnreplayableRouterError
from trl_support_replay.traces import RoutedExperts, RoutesError


def test_a_model_that_runs_without_its_micro_batch() -> None:
    model = build()
    with pytest.raises(RouterReplayError, match="No micro-batch ran while the routes were open"):
        with MegatronRouterReplay(model).schedule(forward_step, some_routes().__getitem__):
            with pytest.raises(RouterReplayError, match="runs in a forward that no micro-batch of the schedule"):
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
