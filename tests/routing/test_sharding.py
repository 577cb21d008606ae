"""FSDP2 and ZeRO-3 over two processes: same weights as one process, and no rank waits for an expert it does not use."""

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.routing.moe_families import build
from tests.routing.sharded_training import single_process

NEEDS_DEEPSPEED = pytest.mark.needs("deepspeed")


@pytest.fixture(scope="module")
def expected():
    return single_process()


@pytest.mark.parametrize(
    ("sharding", "checkpointing"),
    [
        ("fsdp2", "non_reentrant"),
        pytest.param("zero3", "non_reentrant", marks=NEEDS_DEEPSPEED),
        pytest.param("fsdp2", "none", marks=pytest.mark.slow),
        pytest.param("fsdp2", "reentrant", marks=pytest.mark.slow),
        pytest.param("zero3", "none", marks=[NEEDS_DEEPSPEED, pytest.mark.slow]),
        pytest.param("zero3", "reentrant", marks=[NEEDS_DEEPSPEED, pytest.mark.slow]),
    ],
)
def test_three_steps_reach_the_weights_of_one_process(expected, sharding, checkpointing):
    for weights in run_on_ranks(2, "tests.routing.sharded_training:train", sharding, checkpointing):
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=0, msg=f"{name}: {{}}".format)


def test_the_steps_move_the_routers(expected):
    """Otherwise equal weights would say little."""
    fresh = dict(build("qwen3_moe").named_parameters())
    for layer in (1, 2):
        name = f"model.layers.{layer}.mlp.gate.weight"
        assert (expected[name] - fresh[name]).abs().max() > 1e-3
