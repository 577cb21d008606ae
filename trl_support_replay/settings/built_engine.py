"""What the configuration of a built vLLM engine does to sampling, whatever flags, files or models made it so."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from .contract import UnreplayableSettingError, installed_logits_processors
from .sampling_table import unknown
from .sampling_table.vllm import BUILT

_SHOWN = 200  # characters of a value; a configuration within one has thousands


def engine_refusals(vllm_config: Any) -> list[UnreplayableSettingError]:
    """A refusal of each setting of an engine that breaks replay, and of each logits processor installed beside it.

    Args:
        vllm_config: the engine's `VllmConfig`, of this process.
    """
    refused = []
    classes = {"scheduler_cls": _get(_get(vllm_config, "scheduler_config"), "scheduler_cls")}
    worker = _get(_get(vllm_config, "parallel_config"), "worker_cls")
    if not str(worker).startswith("vllm."):  # vLLM puts its own class for the platform in the place of "auto"
        classes["worker_cls"] = worker
    for name, value in [*_changed(vllm_config), *_changed(_get(vllm_config, "model_config")), *classes.items()]:
        field = BUILT.get(name)
        why = unknown(name, BUILT) if field is None else field.refused(value)
        if why is not None:
            needed = None if field is None or None in field.off else field.off[0]
            remedy = _remedy(name.replace("_", "-"), needed)
            shown = value if len(repr(value)) <= _SHOWN else repr(value)[:_SHOWN] + "..."
            refused.append(UnreplayableSettingError(f"the engine's {name}", shown, why.reason, remedy))
    return [*refused, *installed_logits_processors()]


def _remedy(option: str, needed: Any) -> str:
    if needed is not None:
        return f"Build it with {needed}; start a server with --{option} {needed}"
    return f"Build it without; start a server without --{option}, and with a model that does not bring it along"


def check_engine(vllm_config: Any) -> None:
    """Raise the first of `engine_refusals`.

    Raises:
        UnreplayableSettingError: naming the setting of the engine, and its value.
    """
    for error in engine_refusals(vllm_config):
        raise error


def described(refused: Sequence[UnreplayableSettingError]) -> list[dict[str, str]]:
    """Refusals as a server tells them to its clients."""
    return [
        {"setting": error.setting, "value": str(error.value), "reason": error.reason, "remedy": error.remedy}
        for error in refused
    ]


def _changed(owner: Any) -> Iterator[tuple[str, Any]]:
    """The settings of one configuration; those that are in no table only where they are not at their default."""
    for field in () if owner is None else dataclasses.fields(owner):
        value = getattr(owner, field.name, None)
        made = field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        if field.name in BUILT or not (value in _EMPTY or value == default):
            yield field.name, value


_EMPTY: tuple[Any, ...] = (None, False, 0, "", [], {}, ())


def _get(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)
