"""FSDP2 and ZeRO-3 over two processes: same weights as one process, and no rank waits for an expert it does not use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
def test_three_steps_reach_the_weights_of_one_process(tmp_path, expected, sharding, checkpointing):
    path = tmp_path / "weights.pt"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, "-m", "tests.routing.sharded_training", sharding, checkpointing, str(path)],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    weights = torch.load(path)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=0, msg=lambda m, name=name: f"{name}: {m}")


def test_the_steps_move_the_routers(expected):
    """Otherwise equal weights would say little."""
    from tests.routing.moe_families import build

    fresh = dict(build("qwen3_moe").named_parameters())
    for layer in (1, 2):
        name = f"model.layers.{layer}.mlp.gate.weight"
        assert (expected[name] - fresh[name]).abs().max() > 1e-3
