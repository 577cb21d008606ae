"""The demo's tasks: sums of two numbers, explained in words or given as JSON, with rewards that can be checked."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from datasets import Dataset

WORDS_PROMPT = "What is {a} + {b}? Explain how you get there, then give the sum."
JSON_PROMPT = "Add {a} and {b}. Answer with JSON that has a, b and their sum."


def sums(prompt: str = WORDS_PROMPT, size: int = 512, seed: int = 0) -> Dataset:
    """`size` prompts with their operands, from 2 to 20, and answers."""
    rng = random.Random(seed)
    pairs = [(rng.randint(2, 20), rng.randint(2, 20)) for _ in range(size)]
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": prompt.format(a=a, b=b)}] for a, b in pairs],
            "operands": [[a, b] for a, b in pairs],
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


def json_reward(
    completions: list[list[dict[str, str]]], operands: list[list[int]], answer: list[int], **_: Any
) -> list[float]:
    """A quarter for each operand `a` and `b` that is right, and a half for the right `sum`; 0 for what is no JSON."""
    rewards = []
    for completion, (a, b), right in zip(completions, operands, answer, strict=True):
        try:
            given = json.loads(completion[0]["content"])
        except json.JSONDecodeError:  # cut short, or a number that begins with 0
            given = {}
        rewards.append(0.25 * (given.get("a") == a) + 0.25 * (given.get("b") == b) + 0.5 * (given.get("sum") == right))
    return rewards
