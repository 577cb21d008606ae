"""Decides what support replay would do with the settings found, and what TRL does with them today."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ...settings.contract import SamplingSettings, UnreplayableSettingError, find_refusals


@dataclass(frozen=True)
class Verdict:
    """What would happen to one configuration.

    Attributes:
        sampling: the settings that a request would carry; a value that a setting cannot have counts as off.
        refused: every refusal, in the order in which they would be met.
        corrects: how TRL uses the ratio of policy to sampler today: "sequence", "token", or `None` when it takes none.
    """

    sampling: SamplingSettings
    refused: tuple[UnreplayableSettingError, ...]
    corrects: str | None


def judge(args: Any, algorithm: str = "GRPO") -> Verdict:
    """Check settings against the contract, without making a configuration of them.

    Args:
        args: an object with every setting, as written.
        algorithm: "GRPO" or "RLOO".
    """
    # As the replaying trainers' configurations, whose class says it.
    args = SimpleNamespace(**{name: _mapping(value) for name, value in vars(args).items()}, replays_shifts=True)
    rloo = algorithm == "RLOO"
    sampling, refused = find_refusals(args)
    if rloo and args.use_vllm and args.vllm_mode == "server" and sampling.truncates:
        reason, remedy = "RLOO is replayed in the training processes only", "Set it to 'colocate', or use GRPO"
        refused.append(UnreplayableSettingError("vllm_mode", "server", reason, remedy))
    # RLOO takes no notice of the engine's log-probs.
    corrected = not rloo and args.use_vllm and args.vllm_importance_sampling_correction
    corrects = str(args.vllm_importance_sampling_mode).split("_")[0] if corrected else None
    return Verdict(sampling, tuple(refused), corrects)


def _mapping(value: Any) -> Any:
    """A mapping that is written as JSON text, as configurations take it; any other value as it is."""
    if isinstance(value, str) and value.strip().startswith("{"):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value
