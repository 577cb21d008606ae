"""Compares replayed with recorded log-probs, and names what a gap comes from.

Right after generation, engine and policy hold the same weights, so the score of each sampled token over its recorded
support must equal the log-prob that the engine reported. A gap means that something is not what it seems.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .replay_metrics import Metric, mean

Gather = Callable[[torch.Tensor], torch.Tensor]

# A cause is believed when undoing it leaves less than this part of the gap.
EXPLAINS = 0.1
# Measured between a bfloat16 engine and a float32 model without truncation, in nats: mean over tokens.
UNTRUNCATED_HALF_PRECISION_GAP = 0.04
# Between float32 engine and model, in nats. Rounding at a rare token passed 1e-4 in a healthy run whose mean was 4e-6:
# the largest gap has to be generous, and the mean tells small faults that touch every token.
LARGEST_ROUNDING = 1e-3
MEAN_OF_LARGEST = 1 / 20


class ReplayGapError(RuntimeError):
    """Replayed and recorded log-probs differ by more than the tolerance."""


@dataclass(frozen=True)
class Tolerance:
    """Accepted mean and largest gap over a batch's tokens, in nats."""

    mean: float
    max: float

    @classmethod
    def choose(cls, full_precision: bool, value: float | None) -> Tolerance:
        """In float32 of the largest gap, and a twentieth of it for the mean; in half precision of the mean alone."""
        if full_precision:
            largest = LARGEST_ROUNDING if value is None else value
            return cls(mean=largest * MEAN_OF_LARGEST, max=largest)
        return cls(mean=3 * UNTRUNCATED_HALF_PRECISION_GAP if value is None else value, max=math.inf)

    def __str__(self) -> str:
        return f"{self.mean:g} on average" + ("" if math.isinf(self.max) else f" and {self.max:g} at most")


@dataclass(frozen=True)
class GapStatistics:
    """Gaps and raw importance ratios of one generation batch, over all processes.

    Attributes:
        mean, max: absolute difference of replayed and recorded log-prob over recorded tokens, in nats.
        num_tokens, num_sequences: number of those tokens, and of the sequences that have any.
        ratio_mean, ratio_min, ratio_max: exp of the summed difference of each sequence, before any clipping.
        outside_10pct: fraction of sequences whose ratio is outside 0.9 to 1.1.
    """

    mean: float
    max: float
    num_tokens: int
    num_sequences: int
    ratio_mean: float
    ratio_min: float
    ratio_max: float
    outside_10pct: float

    def metrics(self) -> dict[str, Metric]:
        """What is logged, to be joined with other batches."""
        return {
            "support/logprob_gap_mean": mean(self.mean * self.num_tokens, self.num_tokens),
            "support/logprob_gap_max": Metric("max", (self.max,)),
            "sampling/importance_sampling_ratio_raw/mean": mean(
                self.ratio_mean * self.num_sequences, self.num_sequences
            ),
            "sampling/importance_sampling_ratio_raw/min": Metric("min", (self.ratio_min,)),
            "sampling/importance_sampling_ratio_raw/max": Metric("max", (self.ratio_max,)),
            "sampling/outside_10pct": mean(self.outside_10pct * self.num_sequences, self.num_sequences),
        }

    def exceeds(self, tolerance: Tolerance) -> bool:
        return not (self.mean <= tolerance.mean and self.max <= tolerance.max)  # also true for NaN

    @classmethod
    def gather(
        cls,
        replayed: torch.Tensor,
        recorded: torch.Tensor,
        mask: torch.Tensor,
        gather: Gather,
    ) -> GapStatistics:
        """Reduce over processes.

        Args:
            replayed, recorded: `[B, T]` log-probs.
            mask: `[B, T]` bool, the tokens with a recorded support.
            gather: concatenates a `[1, 8]` tensor over processes along dim 0.
        """
        difference = torch.where(mask, replayed.double() - recorded.double(), 0.0)
        gap = difference.abs()
        has_tokens = mask.any(dim=1)
        ratios = difference.sum(dim=1)[has_tokens].exp()
        count = torch.tensor(float(ratios.numel()), device=gap.device, dtype=torch.float64)
        any_ratio = ratios.numel() > 0
        local = torch.stack(
            [
                gap.sum(),
                gap.max() if gap.numel() else gap.sum(),
                mask.sum().double(),
                ratios.sum(),
                ratios.min() if any_ratio else torch.full_like(count, math.inf),
                ratios.max() if any_ratio else torch.full_like(count, -math.inf),
                ((ratios < 0.9) | (ratios > 1.1)).sum().double(),
                count,
            ]
        )
        stats = gather(local[None].float() if local.device.type == "mps" else local[None]).double().cpu()
        tokens, sequences = stats[:, 2].sum().item(), stats[:, 7].sum().item()
        return cls(
            mean=stats[:, 0].sum().item() / max(tokens, 1.0),
            max=stats[:, 1].max().item(),
            num_tokens=int(tokens),
            num_sequences=int(sequences),
            ratio_mean=stats[:, 3].sum().item() / max(sequences, 1.0),
            ratio_min=stats[:, 4].min().item(),
            ratio_max=stats[:, 5].max().item(),
            outside_10pct=stats[:, 6].sum().item() / max(sequences, 1.0),
        )


def explain(
    replayed: torch.Tensor,
    recorded: torch.Tensor,
    mask: torch.Tensor,
    temperature: float,
    rescore: Callable[[float], torch.Tensor],
    weights: str | None,
    gather: Gather,
) -> str:
    """The likely cause of a gap, in one sentence with its evidence.

    Every process takes the same decisions, so that those that shard the model run the same forwards.

    Args:
        replayed, recorded: `[B, T]` log-probs.
        mask: `[B, T]` bool, the tokens with a recorded support.
        temperature: the trainer's temperature.
        rescore: gives `[B, T]` replayed log-probs at another temperature.
        weights: a sentence when engine and policy are known to hold different weights.
        gather: concatenates a `[1, 2]` tensor over processes along dim 0.
    """
    if weights:
        return f"The engine is stale: {weights}."
    gap, _ = _mean_gap(replayed, recorded, mask, gather)
    for shift in (1, -1):
        moved = torch.roll(recorded, -shift, dims=1)
        both = mask & torch.roll(mask, -shift, dims=1)
        both[:, -1 if shift > 0 else 0] = False
        shifted_gap, num_tokens = _mean_gap(replayed, moved, both, gather)
        if num_tokens > 4 and shifted_gap < EXPLAINS * gap:
            return (
                f"The recorded log-probs are shifted by one: the gap vanishes when token t is compared with the record "
                f"of token t{shift:+d}."
            )
    best, best_gap = fit_temperature(
        lambda t: _mean_gap(rescore(t), recorded, mask, gather)[0], temperature / 4, temperature * 4
    )
    if best_gap < EXPLAINS * gap:
        return (
            f"The engine sampled at another temperature: at temperature={best:.3g} the mean gap falls from {gap:.2g} "
            f"to {best_gap:.2g}, and the trainer scores at temperature={temperature:g}."
        )
    return (
        "Neither a shift by one nor another temperature explains it, so the engine most likely computes with other "
        "weights than the policy (a weight sync without effect, another checkpoint or data type), or the logits pass "
        "through something that the trainer does not repeat."
    )


def _mean_gap(replayed: torch.Tensor, recorded: torch.Tensor, mask: torch.Tensor, gather: Gather) -> tuple[float, int]:
    gaps = (replayed - recorded)[mask].abs()
    total, count = gather(torch.stack([gaps.sum(), mask.sum().to(gaps.dtype)])[None]).sum(dim=0).tolist()
    return total / max(count, 1.0), int(count)


def fit_temperature(gap: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """Golden-section search in log-temperature for the least gap; returns the temperature and its gap."""
    golden = (math.sqrt(5) - 1) / 2
    a, b = math.log(low), math.log(high)
    left, right = b - golden * (b - a), a + golden * (b - a)
    gap_left, gap_right = gap(math.exp(left)), gap(math.exp(right))
    for _ in range(14):
        if gap_left < gap_right:
            b, right, gap_right = right, left, gap_left
            left = b - golden * (b - a)
            gap_left = gap(math.exp(left))
        else:
            a, left, gap_left = left, right, gap_right
            right = a + golden * (b - a)
            gap_right = gap(math.exp(right))
    return (math.exp(left), gap_left) if gap_left < gap_right else (math.exp(right), gap_right)
