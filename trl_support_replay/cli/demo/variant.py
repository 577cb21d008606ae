"""One variant of the demo in a process of its own: `python -m trl_support_replay.cli.demo.variant replay|stock ...`.

Two engines do not share a process well. What is logged goes to `metrics.jsonl` in the output folder, which the demo
reads.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

from ...checks.replay_check import GapStatistics
from ...engines.vllm_engine import stock_engine_fixes
from ...settings.config import SupportReplayGRPOConfig
from ...trainers.callbacks import MetricsFile
from ...trainers.grpo import SupportReplayGRPOTrainer
from .settings import SETTINGS, TASKS
from .task import sums


class StockTrainer(GRPOTrainer):
    """TRL's own trainer, which logs gap and raw ratio of each batch under the names that they have with replay."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        replayed, recorded = output["old_per_token_logps"], output["sampling_per_token_logps"]
        found = GapStatistics.gather(replayed, recorded, output["completion_mask"].bool(), self.accelerator.gather)
        for name, metric in found.metrics().items():
            self._metrics["train"][name].append(metric.value)
        return output


def run(variant: str, task: str, model: str, steps: int, output: str) -> None:
    """Train `steps` steps of a task; `variant` is `"replay"` or `"stock"`."""
    chosen = TASKS[task]
    common = (
        SETTINGS
        | chosen.sampling
        | {
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
    )
    given: dict[str, Any] = {
        "reward_funcs": chosen.reward,
        "train_dataset": sums(chosen.prompt),
        "callbacks": [MetricsFile()],
    }
    if variant == "replay":
        config = SupportReplayGRPOConfig(**common, replay_check="warn")
        SupportReplayGRPOTrainer(model, args=config, **given).train()
        return
    with stock_engine_fixes():
        trainer = StockTrainer(model, args=GRPOConfig(**common), **given)
    trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variant", choices=["replay", "stock"])
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--output", required=True)
    run(**vars(parser.parse_args()))
