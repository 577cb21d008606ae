"""`torch.compile`: the routers run outside of the graph, and a model that may not leave it is refused."""

import pytest
import torch

from tests.routing.moe_checks import loss_of, random_routes, tokens, train_step
from tests.routing.moe_families import build
from trl_support_replay.routing import RouteBatch, RouterReplay


def close(compiled, eager, tolerance):
    torch.testing.assert_close(compiled.logits, eager.logits, atol=tolerance, rtol=0)
    for name, grad in compiled.grads.items():
        torch.testing.assert_close(grad, eager.grads[name.replace("_orig_mod.", "")], atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("backend", "tolerance", "checkpointing"),
    [
        ("eager", 0.0, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("eager", 0.0, False),
                ("aot_eager", 0.0, False),
                ("aot_eager", 0.0, True),
                ("inductor", 2e-5, False),
                ("inductor", 2e-5, True),
            )
        ),
    ],
)
def test_compiled_models_replay_each_batch_anew(backend, tolerance, checkpointing):
    torch._dynamo.reset()
    model = build("qwen3_moe", experts="batched_mm", num_hidden_layers=2)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = tokens()
    replay = RouterReplay(model)
    batches = [RouteBatch(random_routes(replay, seed=seed)) for seed in (3, 4)]
    eager = [train_step(model, ids)]
    for batch in batches:
        with replay.scope(batch):
            eager.append(train_step(model, ids))
    compiled = torch.compile(model, backend=backend)
    close(train_step(compiled, ids), eager[0], tolerance)
    replay = RouterReplay(compiled)
    assert replay.layers == (1,)
    for batch, expected in zip(batches, eager[1:], strict=True):
        with replay.scope(batch) as scope:
            close(train_step(compiled, ids), expected, tolerance)
        assert scope.metrics.captured == ids.numel() and scope.metrics.agreement < 0.9
    close(train_step(compiled, ids), eager[0], tolerance)


def test_one_graph_for_the_whole_model_is_refused():
    torch._dynamo.reset()
    model = build("qwen3_moe", experts="batched_mm", num_hidden_layers=2)
    replay = RouterReplay(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="routed experts are replayed outside of the graph"):
        with replay.scope(RouteBatch(random_routes(replay))):
            loss_of(compiled(input_ids=tokens()).logits, tokens())
    assert not replay.is_open
