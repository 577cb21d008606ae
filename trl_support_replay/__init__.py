"""Score the policy on the distribution the sampler really drew from.

Importing the package imports neither TRL, nor torch, nor an engine, and changes nothing in them; names are resolved
when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .checks.replay_check import ReplayGapError
    from .policy.model_probe import UnreplayableModelError
    from .scoring import score_support, score_support_from_logits
    from .settings.config import SupportReplayGRPOConfig, SupportReplayRLOOConfig
    from .settings.contract import UnreplayableSettingError
    from .traces.support import SupportRows
    from .trainers.grpo import SupportReplayGRPOTrainer
    from .trainers.rloo import SupportReplayRLOOTrainer


_EXPORTS = {
    "SupportReplayGRPOConfig": "settings.config",
    "SupportReplayGRPOTrainer": "trainers.grpo",
    "SupportReplayRLOOConfig": "settings.config",
    "SupportReplayRLOOTrainer": "trainers.rloo",
    "UnreplayableModelError": "policy.model_probe",
    "UnreplayableSettingError": "settings.contract",
    "ReplayGapError": "checks.replay_check",
    "SupportRows": "traces.support",
    "score_support": "scoring",
    "score_support_from_logits": "scoring",
}
__all__ = [
    "ReplayGapError",
    "SupportReplayGRPOConfig",
    "SupportReplayGRPOTrainer",
    "SupportReplayRLOOConfig",
    "SupportReplayRLOOTrainer",
    "SupportRows",
    "UnreplayableModelError",
    "UnreplayableSettingError",
    "__version__",
    "score_support",
    "score_support_from_logits",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
