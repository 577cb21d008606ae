"""Training settings of the demo's two variants, for each of its tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .task import JSON_PROMPT, WORDS_PROMPT, json_reward, sum_reward

SETTINGS: dict[str, Any] = {
    "temperature": 1.0,
    "max_completion_length": 40,
    "per_device_train_batch_size": 8,
    "num_generations": 8,
    "learning_rate": 1e-5,
    "gradient_checkpointing": False,
    "seed": 1,
}


@dataclass(frozen=True)
class Task:
    """A task of the demo: its prompt, sampling settings and reward.

    Attributes:
        prompt: a format string with the operands `a` and `b`.
        sampling: the settings that cut the distribution.
        reward: a reward function as TRL takes it.
    """

    prompt: str
    sampling: dict[str, Any]
    reward: Callable[..., list[float]]


TASKS = {
    "words": Task(WORDS_PROMPT, {"top_k": 20, "top_p": 0.9}, sum_reward),
    "json": Task(
        JSON_PROMPT,
        {"vllm_structured_outputs_regex": r'\{"a": [0-9]{1,2}, "b": [0-9]{1,2}, "sum": [0-9]{1,3}\}'},
        json_reward,
    ),
}
