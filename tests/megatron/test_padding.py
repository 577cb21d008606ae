"""Padding changes nothing: not the losses, not the gradients, not what balances the experts."""

from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter

from tests.megatron import tiny_gpt
from trl_support_replay.megatron import MegatronRouterReplay
from trl_support_replay.routing import RouteBatch

LENGTH, BATCH = 11, 2
BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def build(**settings: Any) -> GPTModel:
    return tiny_gpt.build_chunks(tiny_gpt.config(**settings))[0]


def routers(model: GPTModel) -> list[TopKRouter]:
    return [module for module in model.modules() if isinstance(module, TopKRouter)]


def run(model: GPTModel, num_padding: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[list[float]]]:
    """Losses of the tokens, gradients, and each router's tokens per expert, with padding behind the tokens."""
    width = LENGTH + num_padding
    ids, labels = tiny_gpt.tokens(0, BATCH, LENGTH)
    padded = torch.zeros(BATCH, width, dtype=torch.long)
    padded[:, :LENGTH] = ids
    targets = torch.zeros_like(padded)
    targets[:, :LENGTH] = labels
    experts = torch.zeros(BATCH, width, 2, 2, dtype=torch.uint8)
    experts[:, :LENGTH] = tiny_gpt.routes(0, 2, BATCH, LENGTH)
    routes = RouteBatch(experts, padding=torch.arange(width).expand(BATCH, width) >= LENGTH)

    def forward_step(iterator: Any, module: GPTModel) -> Any:
        positions = torch.arange(width).expand(BATCH, width)
        return module(padded, positions, tiny_gpt.causal_mask(width), labels=targets), None

    with MegatronRouterReplay(model).schedule(forward_step, lambda i: routes) as step:
        losses = step(None, model)[0][:, :LENGTH]
        losses.mean().backward()
    counts = [router.local_tokens_per_expert.tolist() for router in routers(model) if router.enable_expert_bias]
    return losses.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}, counts


@pytest.mark.parametrize(
    "settings",
    [
        {},
        BIASED,
        {**BIASED, **FULL},
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
        {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1},
        {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1},
        {"moe_z_loss_coeff": 0.1},
    ],
    ids=lambda settings: "-".join(settings) or "plain",
)
@pytest.mark.parametrize("num_padding", [1, 5])
def test_padding_changes_nothing(settings: dict[str, Any], num_padding: int) -> None:
    losses, grads, counts = run(build(**settings), 0)
    padded_losses, padded_grads, padded_counts = run(build(**settings), num_padding)
    torch.testing.assert_close(padded_losses, losses, rtol=1e-5, atol=0)
    for name, grad in grads.items():
        torch.testing.assert_close(padded_grads[name], grad, rtol=1e-4, atol=1e-6 * grad.abs().max().item(), msg=name)
    assert padded_counts == counts


def test_counts_where_there_are_as_many_positions_as_experts() -> None:
    """There megatron-core's own use of its mask runs through, and counts the wrong thing; elsewhere it is an error."""
    width = tiny_gpt.EXPERTS // BATCH
    padding = torch.tensor([[False, False, True, True], [False, False, False, True]])
    experts = tiny_gpt.routes(0, 2, BATCH, width)
    model = build(**BIASED)
    ids, labels = tiny_gpt.tokens(0, BATCH, width)

    def forward_step(iterator: Any, module: GPTModel) -> Any:
        return module(ids, torch.arange(width).expand(BATCH, width), tiny_gpt.causal_mask(width), labels=labels), None

    routes = RouteBatch(experts, padding=padding)
    with MegatronRouterReplay(model).schedule(forward_step, lambda i: routes, forward_only=True) as step:
        step(None, model)
    for layer, router in enumerate(routers(model)):
        want = torch.bincount(experts[:, :, layer][~padding].flatten().long(), minlength=tiny_gpt.EXPERTS)
        assert torch.equal(router.local_tokens_per_expert.long(), want)

    core = routers(build(**BIASED))[0]
    hidden = torch.randn(width, BATCH, tiny_gpt.HIDDEN, generator=torch.Generator().manual_seed(0))
    _, routing_map = core(hidden, padding.T)
    assert not torch.equal(core.local_tokens_per_expert, (routing_map & ~padding.T.reshape(-1, 1)).sum(0).float())
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        core(hidden[:3], padding.T[:3])
