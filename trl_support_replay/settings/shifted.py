"""Where a setting that shifts logits is replayed: in training with colocated vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .sampling_table import vllm
from .sampling_table.effects import Effect


def replayed_shifts(args: Any) -> dict[str, Any]:
    """The settings of `args` that shift logits and that scoring repeats, with their values; without those that are off.

    Nothing but a trainer's configuration says `replays_shifts`: a server, saved traces and other engines have no way to
    say which settings a completion was sampled with.
    """
    colocated = args.use_vllm and getattr(args, "vllm_mode", "colocate") == "colocate"
    if not (getattr(args, "replays_shifts", False) and colocated):
        return {}
    # A run of TRL's own, which is judged before it is changed, lacks the replaying trainers' settings.
    if getattr(args, "save_traces", None) or getattr(args, "support_growth", False):
        return {}
    if args.beta and getattr(args, "kl_scope", "support") == "full":
        return {}
    kwargs = args.generation_kwargs if isinstance(args.generation_kwargs, Mapping) else {}
    given = {"repetition_penalty": args.repetition_penalty, **kwargs}
    found = {}
    for name, value in given.items():
        field = vllm.REQUEST.get(name)
        if field is None or field.effect is not Effect.SHIFTS or field.is_off(value) or field.narrows(value):
            continue
        if _is_number(value) and (value > 0 or name != "repetition_penalty"):
            found[name] = value
        elif name == "logit_bias" and isinstance(value, Mapping) and all(map(_is_bias, value.items())):
            found[name] = value
    return found


def as_arguments(shifts: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as `LogitShifts` takes them: a bias of -inf only removes the token, which the support then shows."""
    biases = shifts.get("logit_bias", {})
    finite = {int(token): float(bias) for token, bias in biases.items() if bias != -math.inf}
    return {**shifts, "logit_bias": finite}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_bias(item: tuple[Any, Any]) -> bool:
    token, bias = item
    return isinstance(token, int) and (_is_number(bias) or bias == -math.inf)
