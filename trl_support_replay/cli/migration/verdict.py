"""What support replay would do with settings that were found, and what they do without it."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
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
        misspelt: names that no configuration has, with the one that each is close to.
    """

    sampling: SamplingSettings
    refused: tuple[UnreplayableSettingError, ...]
    corrects: str | None
    misspelt: Mapping[str, str]

    @property
    def replayed(self) -> bool:
        """Whether there is something to replay, and nothing refused."""
        return self.sampling.truncates and not self.refused


def judge(values: Mapping[str, Any], algorithm: str = "GRPO") -> Verdict:
    """Check settings against the contract, without making a configuration of them.

    Args:
        values: setting names and values, as written.
        algorithm: "GRPO" or "RLOO".
    """
    from ...settings.config import SupportReplayGRPOConfig, SupportReplayRLOOConfig

    rloo = algorithm == "RLOO"
    fields = {f.name: f for f in dataclasses.fields(SupportReplayRLOOConfig if rloo else SupportReplayGRPOConfig)}
    args = SimpleNamespace(**{name: _default(f) for name, f in fields.items()})
    for name, value in values.items():
        if name in fields:
            setattr(args, name, dict(value) if isinstance(value, dict) else _mapping(value))
    sampling, refused = find_refusals(args)
    if rloo and args.use_vllm and args.vllm_mode == "server" and sampling.truncates:
        reason, remedy = "RLOO is replayed in the training processes only", "Set it to 'colocate', or use GRPO"
        refused.append(UnreplayableSettingError("vllm_mode", "server", reason, remedy))
    # RLOO takes no notice of the engine's log-probs.
    corrected = not rloo and args.use_vllm and args.vllm_importance_sampling_correction
    return Verdict(
        sampling=sampling,
        refused=tuple(refused),
        misspelt={
            name: close[0]
            for name in values
            if name not in fields and (close := difflib.get_close_matches(name, fields, n=1, cutoff=0.8))
        },
        corrects=str(args.vllm_importance_sampling_mode).split("_")[0] if corrected else None,
    )


def sequence_factor(kept_mass: float, length: int) -> float:
    """What today's sequence ratio is multiplied by: `kept_mass ** length`.

    The sampler's log-prob of a token is normalised over the mass that truncation kept, the trainer's over everything,
    so each token's ratio is short of that mass.

    Args:
        kept_mass: mass that survives truncation, averaged over tokens in its logarithm, in (0, 1].
        length: tokens of a completion.
    """
    return math.exp(length * math.log(kept_mass))


def _mapping(value: Any) -> Any:
    """A mapping that is written as JSON text, as configurations take it; any other value as it is."""
    if isinstance(value, str) and value.strip().startswith("{"):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def _default(field: Any) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default
