"""Loads the dataset that the arguments name, and maps its rows to prompts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import CommandError, told

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


def reading(what: str) -> contextlib.AbstractContextManager[None]:
    """Whatever goes wrong when a dataset is read becomes one message that names it.

    Args:
        what: the option and its value.

    Raises:
        CommandError: in the place of the error.
    """
    # `datasets` fails with StopIteration at an empty file. Else what is wrong with a file is in the cause: the error
    # itself names only the generator.
    return told(
        lambda e: f"{what} cannot be read: {'it is empty.' if isinstance(e, StopIteration) else e.__cause__ or e}"
    )


def load_splits(script_args: Any, mixture: Any) -> tuple[Any, str]:
    """The dataset's splits by name, and what to call the dataset.

    A folder of saved traces is read with the checksums of its files, and without the folders inside it, in which runs
    keep the traces of earlier ones.

    Raises:
        CommandError: no dataset is named, or it cannot be read.
        TraceSchemaError: damaged traces.
    """
    from datasets import load_dataset
    from trl import get_dataset

    from ...traces.reading import is_saved_dataset, trace_dataset

    if mixture.datasets:
        name = " + ".join(str(part.path) for part in mixture.datasets)
        with reading(f"datasets: {name}"):
            return get_dataset(mixture), name
    if not script_args.dataset_name:
        raise CommandError("There is no data: give --dataset_name, or `datasets` in the configuration file.")
    name = script_args.dataset_name
    with reading(f"--dataset_name {name}"):
        if is_saved_dataset(name) or any(Path(name).glob("traces-*.parquet")):
            return {"train": trace_dataset(name)}, name
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
