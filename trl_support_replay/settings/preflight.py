"""Checks of datasets, folders and model files, before a model is loaded."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig

from ..traces.columns import TraceSchemaError
from ..traces.reading import is_trace_dataset
from .contract import SamplingSettings, UnreplayableSettingError


class InputError(ValueError):
    """A dataset or folder that training cannot work with."""


def check_single_requests(settings: SamplingSettings, arguments: Mapping[str, Any]) -> None:
    """Refuse shifts of logits where a completion may be the output of several requests.

    Args:
        arguments: of the trainer, by name.

    Raises:
        UnreplayableSettingError: naming the setting that shifts logits.
    """
    for name in ("tools", "environment_factory", "rollout_func"):
        if settings.shifts and arguments.get(name):
            setting, value = next(iter(settings.shifts.items()))
            raise UnreplayableSettingError(
                setting,
                value,
                f"it depends on where each request began, which is not recorded with {name}",
                f"Leave it out, or leave out {name}",
            )


def check_dataset(dataset: Any, name: str) -> None:
    """Refuse a training dataset without prompts.

    Args:
        dataset: a `datasets.Dataset` or `IterableDataset`; a streamed one may not know its columns yet.
        name: what to call it.

    Raises:
        InputError: it has no `prompt` column and holds no traces either, or no rows, or several splits.
    """
    columns = getattr(dataset, "column_names", None)
    if columns is None:
        return
    if isinstance(columns, Mapping):
        raise InputError(f"{name} is a dictionary of the splits {', '.join(columns)}. Give one of them.")
    if "prompt" not in columns and not is_trace_dataset(dataset):
        raise InputError(
            f"{name} has no 'prompt' column (it has: {', '.join(columns) or 'none'}). GRPO needs a prompt in each row: "
            "rename the column that holds it, dataset.rename_column(old, 'prompt')."
        )
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        raise InputError(f"{name} has no rows.")


def check_output_dir(output_dir: str | os.PathLike[str]) -> None:
    """Refuse an output folder that cannot be written, before hours of training end in it.

    Raises:
        InputError: naming the folder and the reason.
    """
    folder = Path(output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"output_dir={str(output_dir)!r} cannot be written: {error}. Name another folder.") from error


def check_traces(args: Any, trains_on_traces: bool) -> None:
    """Refuse traces in and out of a run that replays nothing, which would neither read nor write any.

    Args:
        args: the configuration of a trainer.
        trains_on_traces: whether its training dataset holds saved traces.

    Raises:
        TraceSchemaError: naming what to set.
    """
    if trains_on_traces:
        raise TraceSchemaError(
            "The traces were drawn from the whole vocabulary, and routed_experts_replay=False: nothing of them would "
            "be replayed. Set routed_experts_replay=True."
        )
    if args.save_traces:
        raise TraceSchemaError(
            f"save_traces={args.save_traces!r} keeps what is replayed, and nothing is: no setting cuts tokens, and "
            "routed_experts_replay=False. Set top_k, top_p or min_p, or routed_experts_replay=True, or leave "
            "save_traces out."
        )


def own_config(model: Any, args: Any) -> Any:
    """The model's configuration, read without loading its weights."""
    if not isinstance(model, str):
        return model.config
    init_kwargs: Any = args.model_init_kwargs or {}
    trusted = init_kwargs.get("trust_remote_code") or getattr(args, "trust_remote_code", False)
    return AutoConfig.from_pretrained(model, revision=init_kwargs.get("revision"), trust_remote_code=trusted)


def own_generation_config(model: Any, args: Any) -> GenerationConfig | None:
    """The model's generation defaults, read without loading its weights; `None` when it has none."""
    if not isinstance(model, str):
        return getattr(model, "generation_config", None)
    init_kwargs: Any = args.model_init_kwargs or {}  # a dict by now: the config has parsed what came as JSON
    return generation_defaults(model, init_kwargs.get("revision"))


def generation_defaults(model: str, revision: str | None = None) -> GenerationConfig | None:
    """The generation defaults of a model's files, as `from_pretrained` takes them; `None` when they hold none.

    Older models have them in `config.json`, which counts where there is no `generation_config.json`.

    Args:
        model: a folder or a Hub name.
        revision: of the Hub repository.

    Raises:
        InputError: a file that holds something else than settings.
    """
    files: tuple[dict[str, Any], ...] = ({}, {"config_file_name": "config.json", "_from_model_config": True})
    for file in files:
        try:
            return GenerationConfig.from_pretrained(model, revision=revision or "main", **file)
        except OSError:
            continue
        except TypeError as error:  # JSON that is no object
            name = file.get("config_file_name", "generation_config.json")
            raise InputError(f"{model}: {name} holds no settings ({error}). Restore it from a copy.") from error
    return None
