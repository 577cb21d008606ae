"""Replay over several forwards, backwards in any order, checkpoints and threads."""

import threading

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from tests.routing.moe_checks import BATCH, WIDTH, Step, loss_of, random_routes, record, tokens, train_step
from tests.routing.moe_families import TOP_K
from trl_support_replay.routing import RouteBatch, RouterReplay, RouterReplayError


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
