"""Ten steps of training on fixed completions give the losses and gradients that they gave before.

Write the values anew, after a change that is meant to move them, with

    python -m tests.trainers.test_golden

The file holds every bit. The tests allow for another processor's order of summation; `GOLDEN=exact` does not.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from tests.tiny_models import save_tiny_model
from tests.trainers.conftest import QUIET
from tests.trainers.sharding_worker import reward, rollout
from trl_support_replay import (
    SupportReplayGRPOConfig,
    SupportReplayGRPOTrainer,
    SupportReplayRLOOConfig,
    SupportReplayRLOOTrainer,
)

FILE = Path(__file__).with_name("golden.json")
STEPS = 10
FULL = {"kl_scope": "full", "entropy_scope": "full", "entropy_coef": 0.01}
GRPO = (SupportReplayGRPOTrainer, SupportReplayGRPOConfig)
TRAINERS: dict[str, tuple[Any, Any, dict[str, Any], int]] = {  # the last is the number of micro-batches to compare
    "GRPO": (*GRPO, {"rollout_func": rollout}, 2 * STEPS),
    "GRPO, full KL and entropy": (*GRPO, FULL | {"rollout_func": rollout}, 2 * STEPS),
    # It samples by itself, so another processor may draw other tokens once the weights have moved.
    "RLOO": (SupportReplayRLOOTrainer, SupportReplayRLOOConfig, {}, 4),
}


def train(name: str, model: str, folder: Path) -> dict[str, list[str]]:
    """Loss and norm of the gradient at each micro-batch, as hexadecimal floats."""
    trainer_cls, config_cls, settings, _ = TRAINERS[name]
    rollout_func = {key: settings[key] for key in settings if key == "rollout_func"}
    settings = {key: settings[key] for key in settings if key != "rollout_func"}
    seen: dict[str, list[str]] = {"loss": [], "grad_norm": []}

    class Recording(trainer_cls):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            grads = [p.grad.double().square().sum() for p in self.model.parameters() if p.grad is not None]
            seen["loss"].append(float(loss).hex())
            seen["grad_norm"].append(float(torch.stack(grads).sum().sqrt()).hex())
            return loss

    settings = QUIET | {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "gradient_accumulation_steps": 2,
        "num_iterations": 2,
        "max_completion_length": 10,
        "learning_rate": 1e-2,
        "optim": "sgd",
        "beta": 0.1,
        "top_p": 0.9,
        "seed": 5,
        "replay_check": "off",  # the log-probs of a made-up rollout are no policy's
        "shuffle_dataset": False,
        **settings,
    }
    data = Dataset.from_dict({"prompt": [str(i) for i in range(16)]})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer = Recording(model, reward, config_cls(**settings), train_dataset=data, **rollout_func)
        trainer.train()
    finally:
        torch.set_num_threads(threads)
    return seen


@pytest.mark.parametrize("name", TRAINERS)
def test_training_is_as_before(name, tiny_model_path, tmp_path):
    want, got = json.loads(FILE.read_text())[name], train(name, tiny_model_path, tmp_path)
    assert len(got["loss"]) == 2 * STEPS
    if os.environ.get("GOLDEN") == "exact":
        assert got == want
    for key, values in want.items():
        numbers, before = ([float.fromhex(x) for x in row[: TRAINERS[name][3]]] for row in (got[key], values))
        assert numbers == pytest.approx(before, rel=1e-3, abs=1e-5), key


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_model(Path(folder) / "model")
        values = {name: train(name, model, Path(folder) / str(i)) for i, name in enumerate(TRAINERS)}
    FILE.write_text(json.dumps(values, indent=1) + "\n")
