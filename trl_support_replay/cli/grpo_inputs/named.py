"""Finds rewards, tools and dataset maps by the names in a command line or YAML file."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from ...errors import CommandError
from .datasets import DATASET_MAPS

_NEED_MATH_VERIFY = ("accuracy_reward", "reasoning_accuracy_reward")


def _function(option: str, name: str, known: tuple[str, ...] = ()) -> Callable[..., Any]:
    """The function that a dotted path names, importable also from the current folder.

    Args:
        option: the option that gave the name, for errors.
        name: dotted import path.
        known: short names that the option takes as well, for errors.

    Raises:
        CommandError: there is nothing of that name, or it cannot be called.
    """
    module, _, attribute = name.rpartition(".")
    if not module:
        neither = f"neither one of {', '.join(known)}, nor" if known else "not"
        raise CommandError(f"{option} {name}: {neither} a dotted import path.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise CommandError(f"{option} {name}: {error}.") from error
    if not callable(found):
        raise CommandError(f"{option} {name}: a {type(found).__name__} cannot be called.")
    return found


def reward_functions(script_args: Any) -> list[Any]:
    """Reward models and functions, in the order of TRL's own script.

    Raises:
        CommandError: a name that is unknown or cannot be called, or a reward that needs a package that is missing.
    """
    from trl import rewards as trl_rewards

    named = {
        name: getattr(trl_rewards, name)
        for name in ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
    }
    named["get_soft_overlong_punishment"] = trl_rewards.get_soft_overlong_punishment(
        max_completion_len=1280, soft_punish_cache=256
    )
    found: list[Any] = []
    if script_args.reward_model_name_or_path:
        found.append(script_args.reward_model_name_or_path)
    for name in script_args.reward_funcs or []:
        if name in _NEED_MATH_VERIFY and find_spec("math_verify") is None:
            raise CommandError(
                f"--reward_funcs {name} needs the package math-verify, which is not installed. "
                "Run: pip install 'trl-support-replay[math]'"
            )
        found.append(named[name] if name in named else _function("--reward_funcs", name, tuple(named)))
    return found


def tool_functions(script_args: Any) -> list[Callable[..., Any]] | None:
    """Functions that the model may call; `None` when there are none.

    Raises:
        CommandError: a path that leads nowhere, or to something that cannot be called.
    """
    return [_function("--tools", name) for name in script_args.tools or []] or None


def dataset_map(script_args: Any) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """The function that maps a row of the dataset to one with a prompt; `None` when rows are used as they are.

    Raises:
        CommandError: a name that is unknown, or of something that cannot be called.
    """
    name = script_args.dataset_map
    if name is None:
        return None
    return DATASET_MAPS[name] if name in DATASET_MAPS else _function("--dataset_map", name, tuple(DATASET_MAPS))
