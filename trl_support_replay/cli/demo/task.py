"""The demo's task: sums of two numbers, explained in words, with a reward that can be checked."""

from __future__ import annotations

import random
import re
from typing import Any

from datasets import Dataset

_PROMPT = "What is {a} + {b}? Explain how you get there, then give the sum."


def sums(size: int = 512, seed: int = 0) -> Dataset:
    """`size` prompts with their answers: two operands from 2 to 20."""
    rng = random.Random(seed)
    pairs = [(rng.randint(2, 20), rng.randint(2, 20)) for _ in range(size)]
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": _PROMPT.format(a=a, b=b)}] for a, b in pairs],
            "answer": [a + b for a, b in pairs],
        }
    )


def sum_reward(completions: list[list[dict[str, str]]], answer: list[int], **_: Any) -> list[float]:
    """1 when the sum is among the numbers of the completion, else 0, plus up to 0.2 for a nearby number."""
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        numbers = [int(n) for n in re.findall(r"\d{1,4}", completion[0]["content"])]
        nearest = min((abs(n - right) for n in numbers), default=10**6)
        rewards.append(1.0 if nearest == 0 else 0.2 / (1 + nearest))
    return rewards
