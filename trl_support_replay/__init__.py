"""Score the policy on the distribution the sampler really drew from.

Importing the package imports neither TRL, nor torch, nor an engine, and changes nothing in them; names are resolved
when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import SupportReplayGRPOConfig, SupportReplayRLOOConfig
    from .contract import UnreplayableSettingError
    from .model_probe import UnreplayableModelError
    from .replay_check import ReplayGapError
    from .rloo_trainer import SupportReplayRLOOTrainer
    from .scoring import score_support, score_support_from_logits
    from .traces.support import SupportRows
    from .trainer import SupportReplayGRPOTrainer

__version__ = "0.1.0"

_EXPORTS = {
    "SupportReplayGRPOConfig": "config",
    "SupportReplayGRPOTrainer": "trainer",
    "SupportReplayRLOOConfig": "config",
    "SupportReplayRLOOTrainer": "rloo_trainer",
    "UnreplayableModelError": "model_probe",
    "UnreplayableSettingError": "contract",
    "ReplayGapError": "replay_check",
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
