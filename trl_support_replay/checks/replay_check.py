"""Compares replayed with recorded log-probs, and names what a gap comes from.

Right after generation, engine and policy hold the same weights, so the score of each sampled token over its recorded
support must equal the log-prob that the engine reported. A gap means that something is not what it seems. In float32
its size tells; in half precision rounding hides small faults, and `gap_evidence` looks at what has a direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..traces.columns import Trace
from .gap_causes import (
    Attempt,
    nothing_explains,
    try_again,
    try_live_routes,
    try_places,
    try_shift,
    try_temperature,
)
from .gap_evidence import MARGINS, GapEvidence
from .recorded_gaps import RecordedGaps, flat
from .replay_metrics import Metric, mean

Gather = Callable[[torch.Tensor], torch.Tensor]

# Measured between a bfloat16 engine and a float32 model without truncation, in nats: mean over tokens.
UNTRUNCATED_HALF_PRECISION_GAP = 0.04
# Between float32 engine and model, in nats. Rounding at a rare token passed 1e-4 in a healthy run whose mean was 4e-6:
# the largest gap has to be generous, and the mean tells small faults that touch every token.
LARGEST_ROUNDING = 1e-3
MEAN_OF_LARGEST = 1 / 20
# Exact tokens that each sequence is given beside its own before its mean gap is compared, so that a single rounded
# token of a short sequence does not count as a wrong sequence.
EXACT_TOKENS = 25


class ReplayGapError(RuntimeError):
    """Replayed and recorded log-probs differ by more than the tolerance."""


@dataclass(frozen=True)
class Tolerance:
    """Accepted gaps, in nats: mean and largest over a batch's tokens, and `GapStatistics.worst_sequence`."""

    mean: float
    max: float
    worst_sequence: float

    @classmethod
    def choose(cls, full_precision: bool, value: float | None) -> Tolerance:
        """In float32 of the largest gap, a twentieth of it for the mean; in half precision of mean and sequences."""
        if full_precision:
            largest = LARGEST_ROUNDING if value is None else value
            return cls(mean=largest * MEAN_OF_LARGEST, max=largest, worst_sequence=math.inf)
        mean = 3 * UNTRUNCATED_HALF_PRECISION_GAP if value is None else value
        return cls(mean=mean, max=math.inf, worst_sequence=mean)

    def __str__(self) -> str:
        most = f" and {self.max:g} at most" if math.isinf(self.worst_sequence) else ", also over each long completion,"
        return f"{self.mean:g} on average{most}"


@dataclass(frozen=True)
class GapStatistics:
    """Gaps and raw importance ratios of one generation batch, over all processes.

    Attributes:
        mean, max: absolute difference of replayed and recorded log-prob over recorded tokens, in nats.
        worst_sequence: the largest mean over a sequence to which `EXACT_TOKENS` tokens without a gap are added.
        num_tokens, num_sequences: number of those tokens, and of the sequences that have any.
        ratio_mean, ratio_min, ratio_max: exp of the summed difference of each sequence, before any clipping.
        outside_10pct: fraction of sequences whose ratio is outside 0.9 to 1.1.
    """

    mean: float
    max: float
    worst_sequence: float
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
        accepted = (
            self.mean <= tolerance.mean
            and self.max <= tolerance.max
            and self.worst_sequence <= tolerance.worst_sequence
        )
        return not accepted  # also true for NaN

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
            gather: concatenates a `[1, 9]` tensor over processes along dim 0.
        """
        difference = torch.where(mask, replayed.double() - recorded.double(), 0.0)
        gap = difference.abs()
        has_tokens = mask.any(dim=1)
        ratios = difference.sum(dim=1)[has_tokens].exp()
        by_sequence = gap.sum(dim=1) / (mask.sum(dim=1) + EXACT_TOKENS)
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
                by_sequence.max() if by_sequence.numel() else gap.sum(),
            ]
        )
        stats = gather(local[None].float() if local.device.type == "mps" else local[None]).double().cpu()
        tokens, sequences = stats[:, 2].sum().item(), stats[:, 7].sum().item()
        return cls(
            mean=stats[:, 0].sum().item() / max(tokens, 1.0),
            max=stats[:, 1].max().item(),
            worst_sequence=stats[:, 8].max().item(),
            num_tokens=int(tokens),
            num_sequences=int(sequences),
            ratio_mean=stats[:, 3].sum().item() / max(sequences, 1.0),
            ratio_min=stats[:, 4].min().item(),
            ratio_max=stats[:, 5].max().item(),
            outside_10pct=stats[:, 6].sum().item() / max(sequences, 1.0),
        )


@dataclass(frozen=True)
class Found:
    """What the check says of one batch.

    Attributes:
        statistics: of its gaps.
        fault: a sentence when something is wrong, with the numbers; else `None`.
        signs: the evidence over batches, to log; empty in float32.
    """

    statistics: GapStatistics
    fault: str | None
    signs: dict[str, float]

    def metrics(self) -> dict[str, Metric]:
        """What is logged, over all processes."""
        return self.statistics.metrics() | {name: mean(value, 1) for name, value in self.signs.items()}


class ReplayCheck:
    """The check of one run: bounds on each batch's gaps and, in half precision, the evidence over its batches.

    Args:
        full_precision: whether policy and engine both compute in float32.
        value: `replay_tolerance`. In half precision it scales the margins of the evidence too.
        gather: concatenates a `[1, n]` tensor over processes along dim 0. All processes then decide alike.
    """

    def __init__(self, full_precision: bool, value: float | None, gather: Gather):
        self.tolerance = Tolerance.choose(full_precision, value)
        self._gather = gather
        scale = self.tolerance.mean / Tolerance.choose(False, None).mean
        self._evidence = None if full_precision else GapEvidence(scale)

    def look(
        self,
        replayed: torch.Tensor,
        recorded: torch.Tensor,
        mask: torch.Tensor,
        samples: Sequence[Trace],
        stale: str | None = None,
    ) -> Found:
        """Look at one batch.

        Args:
            replayed, recorded: `[B, T]` log-probs.
            mask: `[B, T]` bool, the tokens with a recorded support.
            samples: the `B` completions.
            stale: a sentence when engine and policy are known to hold different weights. In half precision that is a
                fault by itself, since a step can move the weights by less than rounding does.
        """
        statistics = GapStatistics.gather(replayed, recorded, mask, self._gather)
        faults: list[str] = []
        signs: dict[str, float] = {}
        if statistics.exceeds(self.tolerance):
            faults.append(
                f"Replayed and recorded log-probs differ by {statistics.max:.3g} at most and {statistics.mean:.3g} on "
                f"average over {statistics.num_tokens} tokens; {self.tolerance} is accepted (replay_tolerance)."
            )
        if self._evidence is not None:
            found = self._evidence.add(RecordedGaps.of_batch(samples, replayed, recorded, mask, self._gather))
            faults += [str(sign) for sign in self._evidence.faults(found)]
            signs = {f"support/check_{sign.test}": sign.value for sign in found[-len(MARGINS) :]}
            if stale:
                faults.append("Engine and policy hold different weights.")
        return Found(statistics, faults[0] if faults else None, signs)


def explain(
    replayed: torch.Tensor,
    recorded: torch.Tensor,
    mask: torch.Tensor,
    samples: Sequence[Trace],
    temperature: float,
    rescore: Callable[[float], torch.Tensor] | None,
    rescore_live: Callable[[], torch.Tensor] | None,
    stale: str | None,
    rounding: float,
    gather: Gather,
) -> str:
    """What a gap comes from, with its evidence; or what was tried in vain, and what was not tried.

    Every process takes the same decisions, so that those that shard the model run the same forwards.

    Args:
        replayed, recorded: `[B, T]` log-probs.
        mask: `[B, T]` bool, the tokens with a recorded support.
        samples: the `B` completions.
        temperature: the trainer's temperature.
        rescore: gives `[B, T]` replayed log-probs at a temperature, in the mode that `replayed` was scored in; `None`
            where the weights that `replayed` was scored with are gone.
        rescore_live: gives them through the live routers; `None` where no routes are replayed.
        stale: a sentence when engine and policy are known to hold different weights.
        rounding: mean difference in nats between two scores of the same batch that is no noise.
        gather: concatenates a `[1, n]` tensor over processes along dim 0.
    """
    if stale:
        return f"The engine is stale: {stale}."
    gaps = RecordedGaps.of_batch(samples, replayed, recorded, mask, gather)

    def attempts() -> Iterator[Attempt]:
        yield try_shift(gaps)
        if rescore is not None:
            yield try_again(gaps, flat(rescore(temperature), mask), rounding)
            if rescore_live is not None:
                yield try_live_routes(gaps, flat(rescore_live(), mask))
            yield try_temperature(gaps, lambda t: flat(rescore(t), mask), temperature, "the trainer scores at")
        yield from try_places(gaps)

    not_tried = [
        "other weights than the policy's in the engine (a weight sync without effect, another checkpoint or data type)",
        "another input (images, a prompt that is tokenized or cut in another way)",
        "logits that pass through something that the trainer does not repeat",
    ]
    if rescore is None:
        not_tried.append(
            "noise in the policy's scores, another temperature, other experts (DeepSpeed has updated the weights since)"
        )
    elif rescore_live is None:
        not_tried.append("other experts of a mixture of experts (routed_experts_replay is off)")
    in_vain = []
    for attempt in attempts():
        if attempt.sentence:
            return attempt.sentence
        in_vain.append(attempt)
    return nothing_explains(in_vain, gaps.mean(gaps.replayed - gaps.recorded)[0], not_tried)
