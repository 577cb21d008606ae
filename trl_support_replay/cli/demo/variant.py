"""One variant of the demo in a process of its own: `python -m trl_support_replay.cli.demo.variant replay|stock ...`.

Two engines do not share a process well. Each step is printed as a line `@step {...}`, which the demo reads.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from ...checks.replay_check import GapStatistics
from ...engines.vllm_engine import stock_engine_fixes
from ...settings.config import SupportReplayGRPOConfig
from ...trainers.grpo import SupportReplayGRPOTrainer
from .settings import SETTINGS
from .task import sum_reward, sums


def watched(base: type) -> Any:
    """A subclass of a GRPO trainer that notes gap and raw ratio of each batch; the training is untouched."""

    class Watched(base):  # type: ignore[misc]
        gap: GapStatistics | None = None

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            self.gap = GapStatistics.gather(
                output["old_per_token_logps"],
                output["sampling_per_token_logps"],
                output["completion_mask"].bool(),
                self.accelerator.gather,
            )
            return output

    Watched.__name__ = base.__name__
    return Watched


class StepLines(TrainerCallback):
    """Prints what the demo compares, one line a step."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self._started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not logs or "reward" not in logs:
            return
        gap = self.trainer.gap
        step = {
            "step": state.global_step,
            "importance_ratio_mean": gap.ratio_mean,
            "importance_ratio_outside_10pct": gap.outside_10pct,
            "logprob_gap_mean": gap.mean,
            "logprob_gap_max": gap.max,
            "reward": logs["reward"],
            "step_seconds": time.perf_counter() - self._started,
            "support_size_mean": logs.get("support/size_mean"),
            "singleton_fraction": logs.get("support/singleton_fraction"),
        }
        print("@step " + json.dumps(step), flush=True)


def run(variant: str, model: str, steps: int, output: str) -> None:
    """Train `steps` steps; `variant` is `"replay"` or `"stock"`."""
    common = SETTINGS | {
        "output_dir": output,
        "max_steps": steps,
        "use_vllm": True,
        "vllm_max_model_length": 160,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "bf16": False,
        "use_cpu": not torch.cuda.is_available(),
    }
    lines = StepLines()
    if variant == "replay":
        trainer = watched(SupportReplayGRPOTrainer)(
            model,
            sum_reward,
            SupportReplayGRPOConfig(**common, replay_check="warn"),
            train_dataset=sums(),
            callbacks=[lines],
        )
    else:
        with stock_engine_fixes():
            trainer = watched(GRPOTrainer)(
                model, sum_reward, GRPOConfig(**common), train_dataset=sums(), callbacks=[lines]
            )
    lines.trainer = trainer
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variant", choices=["replay", "stock"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    run(args.variant, args.model, args.steps, args.output)


if __name__ == "__main__":
    main()
