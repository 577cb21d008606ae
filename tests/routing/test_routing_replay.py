"""What replay does at each position, over forwards, backwards, checkpoints, threads and models."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_checks import BATCH, WIDTH, Step, attributes, loss_of, random_routes, tokens, train_step
from moe_families import NUM_EXPERTS, TOP_K, build
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from trl_support_replay.routing import RouteBatch, RouterReplay, RouterReplayError
from trl_support_replay.traces.routes import RoutedExperts


@pytest.fixture
def model():
    """Layer 0 is dense, layers 1 and 2 have experts."""
    return build("qwen3_moe")


def record(model, replay, ids):
    with replay.record() as recording, torch.no_grad():
        model(input_ids=ids)
    return recording.experts(len(ids))


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


# Forwards and backwards


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("order", ["sum", "first forward first", "last forward first"])
def test_two_forwards_in_one_scope_keep_their_own_routes(model, reentrant, order):
    replay = RouterReplay(model)
    ids = [tokens(seed=1), tokens(batch=3, seed=2)]
    batches = [RouteBatch(random_routes(replay, len(x), seed=i)) for i, x in enumerate(ids)]
    separate = []
    for x, batch in zip(ids, batches, strict=True):
        with replay.scope(batch):
            separate.append(train_step(model, x))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.zero_grad(set_to_none=True)
    with replay.scope(*batches) as scope:
        losses = [loss_of(model(input_ids=x).logits, x) for x in ids]
        if order == "sum":
            (losses[0] + losses[1]).backward()
        else:
            for loss in losses if order == "first forward first" else reversed(losses):
                loss.backward()
    for name, parameter in model.named_parameters():
        expected = sum(step.grads[name] for step in separate)
        torch.testing.assert_close(parameter.grad, expected, atol=1e-6, rtol=1e-5)
    assert scope.metrics.captured == 5 * WIDTH


def test_a_forward_only_pass_leaves_nothing_for_the_next_step(model):
    """Scoring without gradients, then a training step with other routes: the step uses its own."""
    replay = RouterReplay(model)
    ids = tokens()
    batch = RouteBatch(random_routes(replay, seed=3))
    with replay.scope(batch):
        expected = train_step(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with replay.scope(RouteBatch(random_routes(replay, seed=4))), torch.no_grad():
        model(input_ids=ids)
    with replay.scope(batch):
        assert train_step(model, ids) == expected


@pytest.mark.parametrize("reentrant", [False, True])
def test_closing_before_a_checkpointed_backward_is_an_error(model, reentrant):
    replay = RouterReplay(model)
    ids = tokens()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with replay.scope(RouteBatch(random_routes(replay))):
        loss = loss_of(model(input_ids=ids).logits, ids)
    with pytest.raises(RouterReplayError, match="runs again after its routes were closed"):
        loss.backward()


def test_without_checkpoints_the_backward_may_come_after_closing(model):
    replay = RouterReplay(model)
    ids = tokens()
    batch = RouteBatch(random_routes(replay))
    with replay.scope(batch):
        expected = train_step(model, ids)
    model.zero_grad(set_to_none=True)
    with replay.scope(batch):
        logits = model(input_ids=ids).logits
    loss_of(logits, ids).backward()
    assert Step(logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}) == expected


@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_on_another_thread(model, reentrant):
    """As on CUDA, where autograd runs checkpointed layers again on threads of its own."""
    replay = RouterReplay(model)
    ids = tokens()
    batch = RouteBatch(random_routes(replay))
    with replay.scope(batch):
        expected = train_step(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.zero_grad(set_to_none=True)
    with replay.scope(batch):
        logits = model(input_ids=ids).logits
        thread = threading.Thread(target=loss_of(logits, ids).backward)
        thread.start()
        thread.join()
    assert Step(logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}) == expected


def test_layers_run_again_with_the_experts_of_their_forward(model):
    """A router that tips the other way before the backward (here: its weights change) does not change the experts."""
    replay = RouterReplay(model)
    ids = tokens()
    captured = torch.zeros(BATCH, WIDTH, dtype=torch.bool)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = []
    hook = replay.routers[1].module.register_forward_hook(lambda m, a, out: calls.append(out[-1].clone()))
    with replay.scope(RouteBatch(random_routes(replay), captured)):
        loss = loss_of(model(input_ids=ids).logits, ids)
        with torch.no_grad():
            replay.routers[1].module.weight.neg_()
        loss.backward()
    live = record(model, replay, ids)[:, :, 1].reshape(-1, TOP_K)
    hook.remove()
    assert torch.equal(calls[0], calls[1]) and not torch.equal(calls[1], live)


@pytest.mark.parametrize("implementation", [CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT])
def test_activation_checkpointing_of_fsdp(model, implementation):
    """`checkpoint_wrapper` around layers, two forwards, backwards in the order of the forwards."""
    replay = RouterReplay(model)
    ids = [tokens(seed=1), tokens(seed=2)]
    batches = [RouteBatch(random_routes(replay, seed=i)) for i in range(2)]
    model.model.embed_tokens.weight.requires_grad_(True)
    with replay.scope(*batches):
        for x in ids:
            loss_of(model(input_ids=x).logits, x).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer, checkpoint_impl=implementation)
    replay = RouterReplay(model)
    assert replay.layers == (1, 2)
    with replay.scope(*batches):
        losses = [loss_of(model(input_ids=x).logits, x) for x in ids]
        for loss in losses:
            loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name.replace("_checkpoint_wrapped_module.", "")]), name
    with replay.scope(batches[0]):
        loss = loss_of(model(input_ids=ids[0]).logits, ids[0])
    with pytest.raises(RouterReplayError, match="runs again after its routes were closed"):
        loss.backward()


def test_a_checkpoint_of_the_users_own(model):
    """One forward is unambiguous. With two, nothing says which one a layer repeats, so that is refused."""
    replay = RouterReplay(model)
    ids = tokens()
    batch = RouteBatch(random_routes(replay))
    with replay.scope(batch):
        expected = train_step(model, ids)

    def run(x):
        return loss_of(checkpoint(lambda x: model(input_ids=x).logits, x, use_reentrant=False), x)

    model.zero_grad(set_to_none=True)
    with replay.scope(batch):
        run(ids).backward()
    assert all(torch.equal(p.grad, expected.grads[n]) for n, p in model.named_parameters() if p.grad is not None)
    replay.open(batch, batch)
    losses = [run(ids), run(ids)]
    with pytest.raises(RouterReplayError, match="inside a checkpoint that RouterReplay does not know, and 2 forwards"):
        losses[0].backward()
    replay.discard()


# Scopes


def test_an_open_scope_refuses_a_second(model):
    replay, second = RouterReplay(model), RouterReplay(model)
    batch = RouteBatch(random_routes(replay))
    replay.open(batch)
    assert replay.is_open
    with pytest.raises(RouterReplayError, match="earlier scope are still open: 0 of 1 forwards are done"):
        replay.open(batch)
    with pytest.raises(RouterReplayError, match="Routes are being replayed"), replay.record():
        pass
    with pytest.raises(RouterReplayError, match=r"model.layers.1.mlp.gate already replays or records"):
        RouterReplay(model)
    with pytest.raises(RouterReplayError, match=r"model.layers.1.mlp.gate already replays or records"):
        second.open(batch)
    with pytest.raises(RouterReplayError, match=r"0 of 1 forwards are done.*never used"):
        replay.close()
    assert not replay.is_open
    with pytest.raises(RouterReplayError, match="No routes are open"):
        replay.close()
    replay.discard()


def test_one_forward_too_many_is_refused(model):
    replay = RouterReplay(model)
    replay.open(RouteBatch(random_routes(replay)))
    model(input_ids=tokens())
    with pytest.raises(RouterReplayError, match="called for forward 2, but routes of 1 are open"):
        model(input_ids=tokens())
    replay.discard()


@pytest.mark.parametrize("where", ["forward", "backward", "caller", "open"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_exception_leaves_nothing_behind(model, where, checkpointing, monkeypatch):
    replay = RouterReplay(model)
    ids = tokens()
    native = train_step(model, ids)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    before = attributes(model)
    batch = RouteBatch(random_routes(replay))

    def fail(*args):
        raise ZeroDivisionError

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        if where == "open":
            patch.setattr("trl_support_replay.routing.scope.OpenRoutes.checkpointed", fail)
            patch.setattr("trl_support_replay.routing.replay._CHECKPOINT_FUNCTIONS", ("forward",))
        if where == "forward":
            patch.setattr(type(model.model.layers[2].mlp.experts), "forward", fail)
        with replay.scope(batch):
            loss = loss_of(model(input_ids=ids).logits, ids)
            if where == "backward":
                model.model.layers[1].mlp.gate.weight.register_hook(fail)
            if where == "caller":
                raise ZeroDivisionError
            loss.backward()
    model.model.layers[1].mlp.gate.weight._backward_hooks = None
    assert attributes(model) == before and not replay.is_open
    if checkpointing:
        model.gradient_checkpointing_disable()
    assert train_step(model, ids) == native


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (torch.zeros(BATCH, WIDTH, 3, TOP_K).int() + torch.arange(TOP_K).int(), "routes of 3 layers, the model has 2"),
        (torch.zeros(BATCH, WIDTH, 2, 3).int() + torch.arange(3).int(), "routes of 3 experts a token.*top_k is 2"),
        (torch.zeros(BATCH, WIDTH, 2, TOP_K).int() + torch.arange(7, 9).int(), r"routes to 9 experts .* has 8"),
    ],
)
def test_routes_of_another_model_are_refused(model, routes, message):
    replay = RouterReplay(model)
    with pytest.raises(RouterReplayError, match="batch 1 of 2: " + message):
        replay.open(RouteBatch(random_routes(replay)), RouteBatch(routes))
    assert not replay.is_open


def test_layer_columns_go_by_global_number(model):
    """Layer 0 is dense: routes that were numbered without it belong to other layers."""
    replay = RouterReplay(model)
    own = record(model, replay, tokens())
    samples = [RoutedExperts(row.numpy(), num_experts=NUM_EXPERTS) for row in own]
    with pytest.raises(RouterReplayError, match=r"routes of layers \(0, 1\), the routers' are \(1, 2\)"):
        replay.open(RouteBatch.from_samples(samples, [0, 0], WIDTH))
    every_layer = torch.cat([torch.zeros_like(own[:, :, :1]), own], dim=2)
    every_layer[:, :, 0] = torch.arange(TOP_K)
    samples = [RoutedExperts(r.numpy(), num_experts=NUM_EXPERTS).select_layers(replay.layers) for r in every_layer]
    with replay.scope(RouteBatch.from_samples(samples, [0, 0], WIDTH)) as scope:
        model(input_ids=tokens())
    assert scope.metrics.agreement == 1


def test_a_forward_of_other_tokens_is_refused(model):
    replay = RouterReplay(model)
    batch = RouteBatch(random_routes(replay))
    with pytest.raises(RouterReplayError, match="routes 18 tokens in forward 0, whose routes are for 2 x 10 = 20"):
        with replay.scope(batch):
            model(input_ids=tokens(width=9))


# Models


def test_two_models_never_touch_each_other():
    actor, reference = build("qwen3_moe"), build("qwen3_moe")
    ids = tokens()
    native = train_step(actor, ids)
    first, second = RouterReplay(actor), RouterReplay(reference)
    a, b = (RouteBatch(random_routes(first, seed=seed)) for seed in (5, 6))
    untouched = attributes(reference)
    with first.scope(a):
        assert attributes(reference) == untouched
        forced = train_step(actor, ids)
        assert torch.equal(reference(input_ids=ids).logits, native.logits)
    with second.scope(b):
        other = train_step(reference, ids)
    assert not torch.equal(forced.logits, other.logits)
    with first.scope(a), second.scope(b):
        logits = [m(input_ids=ids).logits for m in (reference, actor)]
    assert torch.equal(logits[0], other.logits) and torch.equal(logits[1], forced.logits)
    assert train_step(actor, ids) == native and train_step(reference, ids) == native


def test_adapters(model):
    """A PEFT model, with the adapter and without it, and its router among the trained parameters."""
    from peft import LoraConfig, get_peft_model

    ids = tokens()
    native = model(input_ids=ids).logits
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    replay = RouterReplay(peft)
    assert replay.layers == (1, 2)
    step = train_step(peft, ids)
    with replay.scope(RouteBatch(record(peft, replay, ids))):
        assert train_step(peft, ids) == step
    with replay.scope(RouteBatch(random_routes(replay))):
        forced = train_step(peft, ids)
    assert step.grads and all("lora" in name for name in step.grads) and not forced.same_grads(step)
    with peft.disable_adapter():
        own = record(peft, replay, ids)
        with replay.scope(RouteBatch(own)) as scope:
            assert torch.equal(peft(input_ids=ids).logits, native)
    assert scope.metrics.agreement == 1


# Metrics


def test_agreement_by_layer_and_order(model):
    replay = RouterReplay(model)
    ids = tokens()
    own = record(model, replay, ids)
    with replay.scope(RouteBatch(own.flip(-1))) as scope:
        model(input_ids=ids)
    # Another order of the same experts: the sum over experts is rounded differently, and may tip the next router.
    assert scope.metrics.agreement_per_layer[0] == 1
    assert scope.metrics.order_mismatch > 0.9

    model = build("qwen3_moe", num_hidden_layers=1, mlp_only_layers=[])
    replay = RouterReplay(model)
    own = record(model, replay, ids)
    routes = own.clone()
    # One expert of four positions replaced by one the live router did not choose.
    for sample, position in [(0, 0), (0, 5), (1, 1), (1, 9)]:
        chosen = set(own[sample, position, 0].tolist())
        routes[sample, position, 0, 0] = next(e for e in range(NUM_EXPERTS) if e not in chosen)
    # Two positions in another order, one of them not captured, one position padding.
    routes[1, 3], routes[1, 4] = own[1, 3].flip(-1), own[1, 4].flip(-1)
    captured = torch.ones(BATCH, WIDTH, dtype=torch.bool)
    captured[1, 4] = captured[0, 7] = False
    padding = torch.zeros_like(captured)
    padding[0, 7] = True
    with replay.scope(RouteBatch(routes, captured, padding)) as scope:
        model(input_ids=ids)
    metrics = scope.metrics
    assert (metrics.captured, metrics.uncaptured, metrics.layers) == (18, 1, (0,))
    assert metrics.agreement == pytest.approx(1 - 4 / (18 * TOP_K))
    assert metrics.agreement_per_layer == (metrics.agreement,)
    assert metrics.order_mismatch == pytest.approx(1 / 18)


def test_layers_that_run_again_are_counted_once(model):
    replay = RouterReplay(model)
    ids = tokens()
    batch = RouteBatch(random_routes(replay))
    with replay.scope(batch) as plain:
        train_step(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with replay.scope(batch) as checkpointed:
        train_step(model, ids)
    assert checkpointed.metrics == plain.metrics


# Recording


def test_generate_is_recorded_token_by_token(model):
    """Routes recorded while generating are those of one forward over the whole sequence, padding left out."""
    model.eval()
    replay = RouterReplay(model)
    prompts, starts = [tokens(1, 5, seed=1)[0], tokens(1, 3, seed=2)[0]], [0, 2]
    ids, mask = torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.long)
    ids[0], ids[1, 2:], mask[1, :2] = prompts[0], prompts[1], 0
    length = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    with replay.record() as recording:
        out = model.generate(input_ids=ids, attention_mask=mask, use_cache=True, **length)
    assert recording.experts(2).shape == (2, 10, 2, TOP_K)
    samples = recording.samples(starts, [11, 9], width=11)
    for i, (start, routes) in enumerate(zip(starts, samples, strict=True)):
        whole = record(model, replay, out[i : i + 1, start:])[0]
        assert routes.captured_prefix == len(routes) - 1 and routes.layers == (1, 2)
        assert routes[:-1].to_int64().tolist() == whole[:-1].to(torch.int64).tolist()
    with pytest.raises(RouterReplayError, match="no batches of 3"):
        recording.experts(3)
    with replay.record() as recording:
        model.generate(input_ids=ids, attention_mask=mask, use_cache=False, **length)
    with pytest.raises(RouterReplayError, match="45 positions .* sequences of 11 positions.*use_cache=True"):
        recording.samples(starts, [11, 9], width=11)


def test_recording_counts_a_checkpointed_layer_once(model):
    replay = RouterReplay(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with replay.record() as recording:
        train_step(model, tokens())
    assert recording.experts(BATCH).shape == (BATCH, WIDTH, 2, TOP_K)


def test_nothing_is_recorded_without_a_forward(model):
    with RouterReplay(model).record() as recording:
        pass
    with pytest.raises(RouterReplayError, match="layer 1 recorded 0 forwards"):
        recording.experts(1)
