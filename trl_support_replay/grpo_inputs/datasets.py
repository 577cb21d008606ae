"""Loads the dataset that the arguments name, and makes prompts of rows that have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..cli import CommandError

_GSM8K_TASK = "Reason step by step, and put the final answer within \\boxed{}."


def gsm8k(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `openai/gsm8k` for TRL's `accuracy_reward`.

    The reward reads its right answer from the column `solution`, and that of a completion from LaTeX. GSM8K ends its
    worked answers with `#### 1,234`.

    Args:
        row: with `question` and `answer`.

    Returns:
        `prompt`, one message of the user, and `solution`, the number alone.

    Raises:
        ValueError: an answer without `####`.
    """
    _, mark, final = row["answer"].rpartition("####")
    if not mark:
        raise ValueError(f"An answer without '####' is not GSM8K's: {row['answer'][:80]!r}.")
    content = f"{row['question']}\n\n{_GSM8K_TASK}"
    return {"prompt": [{"role": "user", "content": content}], "solution": final.strip().replace(",", "")}


DATASET_MAPS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"gsm8k": gsm8k}


def load_splits(script_args: Any, mixture: Any) -> tuple[Any, str]:
    """The dataset's splits by name, and what to call the dataset.

    Raises:
        CommandError: no dataset is named.
    """
    from datasets import load_dataset
    from trl import get_dataset

    if mixture.datasets:
        return get_dataset(mixture), " + ".join(str(part.path) for part in mixture.datasets)
    if not script_args.dataset_name:
        raise CommandError("There is no data: give --dataset_name, or `datasets` in the configuration file.")
    name = script_args.dataset_name
    return load_dataset(name, name=script_args.dataset_config, streaming=script_args.dataset_streaming), name


def choose_split(splits: Any, split: str, name: str, option: str) -> Any:
    """One split of a dataset.

    Raises:
        CommandError: there is none of that name.
    """
    if split not in splits:
        raise CommandError(f"{option} {split}: dataset {name} has the splits {', '.join(map(str, splits))}.")
    return splits[split]


def mapped(dataset: Any, function: Callable[[dict[str, Any]], dict[str, Any]] | None) -> Any:
    """Rows as `function` makes them, without the columns that it does not return; as they are when it is `None`."""
    return dataset if function is None else dataset.map(function, remove_columns=dataset.column_names)
