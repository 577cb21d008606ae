"""How much probability the policy moves out of the recorded supports while one batch is optimised.

Replay scores a policy over the supports that were sampled from, and sees nothing of what happens outside: a policy
whose mass leaves them keeps its replayed ratios. The mass of a support under the current policy, over the whole
vocabulary, shows it. It costs a full projection.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from ..batch.layout import recorded_mask
from ..traces.columns import Trace
from .replay_metrics import GatherRow, Metric, largest, mean, over_processes

logger = logging.getLogger(__name__)


class SupportGrowth:
    """Mass outside the supports, now and when the batch was first looked at.

    Args:
        floor: mean mass inside the supports below which a warning is given, once per generation batch.
    """

    def __init__(self, floor: float):
        self._floor = floor
        self._first: dict[int, torch.Tensor] = {}
        self._warned = False

    def start(self) -> None:
        """A new generation batch."""
        self._first = {}
        self._warned = False

    def measure(
        self, samples: Sequence[Trace], log_mass: torch.Tensor, step: int, gather: GatherRow
    ) -> dict[str, Metric]:
        """Metrics of one pass over some samples of the batch, over all processes, which call it together.

        - `support/outside_mass`: mean over tokens of the mass outside their support.
        - `support/outside_mass_growth`: mean over tokens of its increase since the sample was first scored.
        - `support/outside_mass_growth_max`: the largest increase, 0 where there is none.

        Args:
            samples: `B` completions, the same objects in every pass.
            log_mass: `[B, T]` log of the mass of each support under the current policy.
            step: optimizer step, for the warning.
            gather: over processes.
        """
        on = recorded_mask(samples, log_mass.shape)
        mass = log_mass.detach().exp().double().cpu()
        outside, growth = [np.zeros(0)], [np.zeros(0)]
        for sample, row, mask in zip(samples, mass, on, strict=True):
            inside = row[mask]
            # The batch keeps its samples alive, so an id stands for one of them.
            growth.append((self._first.setdefault(id(sample), inside) - inside).numpy())
            outside.append((1 - inside).numpy())
        moved, out = np.concatenate(growth), np.concatenate(outside)
        metrics = over_processes(
            {
                "support/outside_mass": mean(out.sum(), len(out)),
                "support/outside_mass_growth": mean(moved.sum(), len(moved)),
                "support/outside_mass_growth_max": largest(np.append(moved, 0.0)),
            },
            gather,
        )
        self._warn(1 - metrics["support/outside_mass"].value, metrics["support/outside_mass_growth"].value, step)
        return metrics

    def _warn(self, inside: float, growth: float, step: int) -> None:
        if not inside < self._floor or self._warned:  # NaN where no token has a support
            return
        self._warned = True
        logger.warning(
            "At step %d the recorded supports hold %.3f of the policy's mass on average, less than "
            "support_mass_floor=%g; %.3f left them since the batch was sampled. Replay scores the policy inside its "
            "supports only and does not see where that mass went: optimise a batch for fewer steps, lower the learning "
            "rate, or truncate less.",
            step,
            inside,
            self._floor,
            growth,
        )
