"""How long routes last: scopes, models side by side, metrics and recording."""

from dataclasses import replace

import pytest
import torch

from tests.routing.moe_checks import BATCH, WIDTH, attributes, loss_of, random_routes, record, tokens, train_step
from tests.routing.moe_families import NUM_EXPERTS, TOP_K, build
from trl_support_replay.routing import RouteBatch, RouteMetrics, RouterReplay, RouterReplayError
from trl_support_replay.traces.routes import RoutedExperts

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
    samples = [
        RoutedExperts(row[:, list(replay.layers)].numpy(), num_experts=NUM_EXPERTS, layers=replay.layers)
        for row in every_layer
    ]
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


@pytest.mark.needs("peft")
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
    all_alike = RouteMetrics(metrics.layers, TOP_K, (2 * TOP_K,), 0, 2, 0)
    assert (metrics + all_alike).agreement == pytest.approx(1 - 4 / (20 * TOP_K))
    assert (metrics + all_alike).order_mismatch == pytest.approx(1 / 20)
    with pytest.raises(ValueError, match=r"layers \(0,\) .* layers \(1,\)"):
        metrics + replace(all_alike, layers=(1,))


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
