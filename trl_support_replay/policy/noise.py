"""Switches off dropout and other noise of training mode, which no engine samples with.

The engine that sampled a token ran the model without noise, so the trainer has to score it without noise too: in the
loss as well as in the old, reference and check passes. Evaluation mode is no way out for the loss, since gradient
checkpointing works in training mode only. So the noise itself is switched off.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, MutableMapping
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..routing.discovery import configs

_NOISE = re.compile("drop|jitter|noise", re.IGNORECASE)
_CHANCES = ("p", "dropout_p")  # what operators of torch call the probability of a drop


def silence(model: nn.Module) -> dict[str, float]:
    """Set every probability of dropout, layer drop and router jitter that a module of `model` holds to 0.

    The configuration, which is saved with the model, stays as it is. Modules that read it at each call keep their
    noise; `RandomDraws` finds them.

    Args:
        model: a model, wrapped (PEFT, DDP, FSDP) or not.

    Returns:
        The names of what was not 0, as the modules spell them, and the largest value of each.
    """
    found: dict[str, float] = {}
    for path, module in model.named_modules():
        for holder, key, name in _noise_values(path, module):
            found[name] = max(found.get(name, 0.0), float(holder[key]))
            holder[key] = type(holder[key])(0)
    return found


def _noise_values(path: str, module: nn.Module) -> Iterator[tuple[MutableMapping[str, Any], str, str]]:
    """`(holder, key, name)` of each value above 0 that says how much noise `module` makes."""
    own_name = next((part for part in reversed(path.split(".")) if _NOISE.search(part)), type(module).__name__)
    is_dropout = _NOISE.search(type(module).__name__) is not None
    for key, value in list(vars(module).items()):
        if _NOISE.search(key) and isinstance(value, dict):  # PEFT: one for each adapter
            for adapter, inner in value.items():
                if _is_amount(inner):
                    yield value, adapter, key
        elif _is_amount(value) and (_NOISE.search(key) or (is_dropout and key == "p")):
            yield vars(module), key, own_name if is_dropout else key


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


def noise_settings(model: nn.Module) -> dict[str, float]:
    """Settings above 0 in the configurations of a model and its adapters whose names speak of noise."""
    adapters = getattr(model, "peft_config", None)
    holders = [*configs(model), *(adapters.values() if isinstance(adapters, dict) else ())]
    return {
        key: value
        for holder in holders
        for key, value in vars(holder).items()
        if _NOISE.search(key) and _is_amount(value)
    }


class RandomDraws(TorchDispatchMode):
    """Notes the random numbers that a forward draws, and the module that draws them.

    A value comparison alone would miss noise that has no effect yet: that of a LoRA branch, for example, whose second
    factor starts at 0. What counts is every operator that torch marks as random, except dropout with a probability of
    0 or 1. A single number decides what runs next (layer drop) and is no noise in itself: it is replaced by `edge`.
    Forwards with an edge next to 0 and with an edge next to 1 differ if it decides anything.

    Args:
        edge: what single random numbers are replaced by.

    Attributes:
        drawn_by: module and name of operator of each draw that counts.
    """

    def __init__(self, edge: float):
        super().__init__()
        self._edge = edge
        self.drawn_by: list[tuple[nn.Module | None, str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and not _is_constant(func, args, kwargs or {}):
            if isinstance(out, torch.Tensor) and out.numel() == 1:
                if out.is_floating_point():
                    out.fill_(self._edge)
            else:
                self.drawn_by.append((_calling_module(), str(func)))
        return out


def _is_constant(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a random operator has only one possible result: a dropout of 0, or a range that is one point."""
    given = {
        argument.name: args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        for i, argument in enumerate(func._schema.arguments)
    }
    if any(given.get(name) in (0, 1) for name in _CHANCES if not isinstance(given.get(name), torch.Tensor)):
        return True
    return "from" in given and given["from"] == given.get("to")


def _calling_module() -> nn.Module | None:
    """The module whose code is running: the nearest `self`, or `module` of an attention function, on the stack."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        for name in ("self", "module"):
            if isinstance(found := frame.f_locals.get(name), nn.Module):
                return found
        frame = frame.f_back
    return None
