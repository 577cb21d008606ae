"""Which experts each position goes through under replay, and the weights and gradients that follow."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from tests.routing.moe_checks import BATCH, WIDTH, loss_of, random_routes, record, tokens, train_step
from tests.routing.moe_families import NUM_EXPERTS, TOP_K, build
from trl_support_replay.routing import RouteBatch, RouterReplay
from trl_support_replay.routing.devices import stack_across_devices
from trl_support_replay.routing.recording import Recording
from trl_support_replay.traces.routes import RoutedExperts


def used_experts(model, replay, ids):
    """`[B, S, L, k]` the experts that each router really returned, watched from outside."""
    seen = []
    hooks = [r.module.register_forward_hook(lambda m, a, out: seen.append(out[-1].clone())) for r in replay.routers]
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return torch.stack([experts.view(*ids.shape, -1) for experts in seen], dim=2)


# Positions


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_position_uses_the_experts_of_its_kind(data):
    model = build("qwen3_moe")
    replay = RouterReplay(model)
    shape = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    ids = tokens(*shape, seed=data.draw(st.integers(0, 1000)))
    kinds = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=ids.numel(), max_size=ids.numel())))
    captured, padding = (kinds == 0).view(shape), (kinds == 2).view(shape)
    routes = random_routes(replay, *shape, seed=data.draw(st.integers(0, 1000)))
    with replay.scope(RouteBatch(routes, captured, padding)) as scope:
        used = used_experts(model, replay, ids)
    assert torch.equal(used[captured], routes[captured])
    assert (used[padding] == torch.arange(TOP_K)).all()
    # Each layer's live choice depends on the layers below; the first one's does not.
    assert torch.equal(used[:, :, 0][~captured & ~padding], record(model, replay, ids)[:, :, 0][~captured & ~padding])
    assert (scope.metrics.captured, scope.metrics.uncaptured) == (captured.sum(), (kinds == 1).sum())


def test_uncaptured_positions_take_the_live_router(model):
    replay = RouterReplay(model)
    ids = tokens()
    native = train_step(model, ids)
    own = record(model, replay, ids)
    captured = torch.zeros(BATCH, WIDTH, dtype=torch.bool)
    with replay.scope(RouteBatch(random_routes(replay), captured)) as scope:
        assert train_step(model, ids) == native
    assert scope.metrics.uncaptured == ids.numel() and scope.metrics.agreement != scope.metrics.agreement
    captured[:, ::2] = True
    with replay.scope(RouteBatch(own, captured)) as scope:
        assert train_step(model, ids) == native
    assert (scope.metrics.captured, scope.metrics.agreement) == (ids.numel() / 2, 1)


def test_padding_does_not_reach_real_tokens_or_counts(model):
    """Left and right padding as TRL builds it: real tokens get their own routes, wherever they stand."""
    replay = RouterReplay(model)
    lengths, starts, width = [4, 6], [3, 1], 9
    rows = [tokens(1, n, seed=n) for n in lengths]
    own = [record(model, replay, row)[0] for row in rows]
    samples = [RoutedExperts(r.numpy(), num_experts=NUM_EXPERTS, layers=replay.layers) for r in own]
    alone = [model(input_ids=row).logits[0] for row in rows]
    ids, mask = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width, dtype=torch.long)
    for i, (row, start, n) in enumerate(zip(rows, starts, lengths, strict=True)):
        ids[i, start : start + n], mask[i, start : start + n] = row[0], 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with replay.scope(RouteBatch.from_samples(samples, starts, width)) as scope:
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    for i, (start, n) in enumerate(zip(starts, lengths, strict=True)):
        torch.testing.assert_close(logits[i, start : start + n], alone[i], atol=1e-5, rtol=1e-5)
    assert (scope.metrics.captured, scope.metrics.uncaptured, scope.metrics.agreement) == (10, 0, 1)


@pytest.mark.parametrize("control", ["samples swapped", "shifted by one position"])
def test_misplaced_routes_are_seen(model, control):
    """The negative control of every bitwise check here: routes of the wrong tokens give other logits and gradients."""
    replay = RouterReplay(model)
    ids = tokens()
    native = train_step(model, ids)
    own = record(model, replay, ids)
    wrong = own.flip(0) if control == "samples swapped" else own.roll(1, dims=1)
    with replay.scope(RouteBatch(wrong)) as scope:
        step = train_step(model, ids)
    assert not torch.allclose(step.logits, native.logits, atol=1e-2)
    assert not step.same_grads(native)
    assert scope.metrics.agreement < 0.9


# Weights and gradients


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "llama4_text"])
def test_gradient_under_forced_routes_is_that_of_the_loss(model_type):
    """With the routes fixed the loss is smooth in the router's weights, so finite differences tell the truth."""
    model = build(model_type)
    replay = RouterReplay(model)
    ids = tokens()
    batch = RouteBatch(random_routes(replay))
    router = replay.routers[-1].module
    weight = next(p for p in router.parameters() if p.dim() == 2)
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    direction /= direction.norm()
    with replay.scope(batch):
        grad = train_step(model, ids).grads[next(n for n, p in model.named_parameters() if p is weight)]
    losses, step = [], 1e-2
    with torch.no_grad():
        for sign in (1, -2):
            weight.add_(direction, alpha=sign * step)
            with replay.scope(batch):
                losses.append(loss_of(model(input_ids=ids).logits.double(), ids).item())
    slope = (losses[0] - losses[1]) / (2 * step)
    assert abs(slope) > 1e-3
    assert (grad * direction).sum().item() == pytest.approx(slope, rel=0.03, abs=3e-4)


def test_weights_outside_the_live_groups_are_the_live_scores():
    """DeepSeek-V2 masks all groups but the best before its top-k; a recorded one elsewhere keeps its score."""
    model = build("deepseek_v2", norm_topk_prob=False)
    replay = RouterReplay(model)
    ids = tokens()
    live = record(model, replay, ids)
    per_group = NUM_EXPERTS // 2
    other_group = (live[..., :1] // per_group + 1) % 2 * per_group + torch.arange(TOP_K)
    router = replay.routers[0].module
    outputs = {}
    hook = router.register_forward_hook(lambda m, a, out: outputs.update(logits=out[0], weights=out[1], ids=out[2]))
    with replay.scope(RouteBatch(other_group)):
        logits = model(input_ids=ids).logits
        expected = outputs["logits"].softmax(-1).gather(1, outputs["ids"]) * router.routed_scaling_factor
        assert torch.equal(outputs["ids"], other_group[:, :, 0].reshape(-1, TOP_K))
        assert (outputs["weights"] > 0).all()
        torch.testing.assert_close(outputs["weights"], expected)
        loss_of(logits, ids).backward()
    hook.remove()
    assert (router.weight.grad.abs().sum(1) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe"])
def test_every_implementation_of_the_experts(model_type, experts, dtype):
    model = build(model_type, experts=experts, dtype=dtype)
    replay = RouterReplay(model)
    ids = tokens()
    native = train_step(model, ids)
    with replay.scope(RouteBatch(record(model, replay, ids))):
        assert train_step(model, ids) == native
    with replay.scope(RouteBatch(random_routes(replay))):
        assert not torch.allclose(train_step(model, ids).logits, native.logits, atol=1e-3)


def test_load_balancing_loss_keeps_the_live_probabilities():
    model = build("qwen3_moe", mlp_only_layers=[0, 2], output_router_logits=True)
    replay = RouterReplay(model)
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    live = model(input_ids=ids, attention_mask=mask)
    batch = RouteBatch(random_routes(replay), padding=mask == 0)
    with replay.scope(batch):
        replayed = model(input_ids=ids, attention_mask=mask)
    assert live.aux_loss > 0 and torch.equal(replayed.aux_loss, live.aux_loss)
    assert not torch.allclose(replayed.logits, live.logits, atol=1e-3)


def test_routers_on_several_devices():
    """As `device_map` spreads them; tensors without values stand for those of two GPUs."""
    with FakeTensorMode():
        recording = Recording((3, 7), NUM_EXPERTS)
        for column, device in enumerate(("cuda:0", "cuda:1")):
            experts = torch.zeros(BATCH * WIDTH, TOP_K, dtype=torch.int64, device=device)
            recording.handle(column)(experts, experts, lambda experts=experts: (experts, experts))
        together = recording.experts(BATCH)
        assert together.shape == (BATCH, WIDTH, 2, TOP_K)
        assert together.device == torch.device("cuda:0")
        counts = [torch.zeros((), dtype=torch.int64, device=f"cuda:{i}") for i in (1, 0, 1)]
        assert stack_across_devices(counts).device == torch.device("cuda:1")
