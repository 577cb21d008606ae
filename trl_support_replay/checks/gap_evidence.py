"""Whether the log-probs of a half-precision run differ by more than rounding, from evidence gathered over batches.

Rounding hides small faults in a single token, but it has no direction. Three sums find what has one. Let `p` be the
probability that the engine recorded for a sampled token, `q` the one that the policy gives it, and `r = q / p`. The
engine drew the token from `p` over a support `S`, so for **any** policy that is scored over the same `S`

    E[r] = sum over S of p (q / p) = 1

whatever the rounding does. (The mean of `log r` is not 0: with rounding of variance `v` it is `-v / 2`.)

- *mass*: the mean of `r - 1`. It is 0, or else scores and samples belong to different sets of tokens: a score over more
  ids, of which `S` holds a mass of 0.95, gives -0.05.
- *sharpness*: the slope of `r - 1` over `x = log(p |S|)`, which is how much likelier the token is than in a uniform
  draw from its support. With an engine whose temperature is `1 + e` times the policy's, `log r = e (log p + H)` to
  first order, with `H` the entropy over `S`: the slope has the sign of `e`, and is below it in size.
- *spread*: the growth of `|r - 1|` against the run's own earlier batches, where `1 - p` says how much rounding a token
  of probability `p` shows. Weights that fall behind move log-probs both ways: mass and sharpness stay, it grows.

Each is a ratio of sums, `sum a / sum b`, whose numerator has mean 0 in a healthy run. A fault is believed when the
ratio is beyond its margin by `SIGMAS` standard errors, of which the larger counts of two: over tokens, `sqrt(sum a^2) /
sum b`, and over sequences (tokens of a sequence may err alike), with the residual `a - ratio * b` summed for each
sequence first. The margins are for what is no chance and no fault either, as an engine that rounds its logits. The
first standard error takes `a` itself and not its residual, so that a few tokens that happen to agree prove nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .recorded_gaps import RecordedGaps

SIGMAS = 6.0
# Tokens over which evidence is kept: the batch alone, and with exponential forgetting. Short memories find a large
# fault at once, also late in a run; the long one finds a small fault.
MEMORIES = (0, 2_000, 5_000, 15_000, 50_000)
# Tokens with a choice after which the run's earlier spread is known well enough to be compared with.
REFERENCE_TOKENS = 2_000
# The earlier spread forgets as the longest memory does, but not faster than over so many batches. A batch is taken into
# it with at most this factor of it, so that it follows the slow change of a training and not a fault.
REFERENCE_BATCHES = 20
REFERENCE_GROWTH = 1.1
# Largest ratios that count as healthy (docs/metrics.md gives what was measured).
MARGINS = {"mass": 0.005, "sharpness": 0.004, "spread": 0.25}

_BECAUSE = {
    "mass": "The policy's scores hold {one_plus:.3f} ± {error:.3f} of the probability of each support on average, "
    "where 1 is due: they are taken over {more_or_fewer} ids than the engine drew from.",
    "sharpness": "The policy is {sharper_or_flatter} than what the engine drew from (slope {value:+.4f} ± "
    "{error:.4f}), as it is when the engine's temperature is {higher_or_lower} than the trainer's.",
    "spread": "The gap has become {one_plus:.2f} ± {error:.2f} times that of the run's earlier batches, as "
    "it does when the engine's weights fall behind.",
}


@dataclass(frozen=True)
class Sign:
    """What one of the tests says over one memory.

    Attributes:
        test: among `MARGINS`.
        value: the ratio, 0 in a healthy run.
        error: its standard error.
        tokens: over how many tokens.
    """

    test: str
    value: float
    error: float
    tokens: int

    def is_fault(self, scale: float) -> bool:
        """Whether it is beyond `scale` times its margin. Less spread than before is none; NaN is left to the mean."""
        size = self.value if self.test == "spread" else abs(self.value)
        return size - SIGMAS * self.error > scale * MARGINS[self.test]

    def __str__(self) -> str:
        above = self.value > 0
        sentence = _BECAUSE[self.test].format(
            value=self.value,
            one_plus=1 + self.value,
            error=self.error,
            more_or_fewer="fewer" if above else "more",
            sharper_or_flatter="sharper" if above else "flatter",
            higher_or_lower="higher" if above else "lower",
        )
        return f"{sentence} That is the evidence of {self.tokens} tokens."


class GapEvidence:
    """Running sums of one run, the same on every process. They start anew when a run is resumed.

    Args:
        scale: factor on all margins.
    """

    def __init__(self, scale: float = 1.0):
        self._scale = scale
        # For each memory and test: sums over tokens of a, b, a^2, and over sequences of a^2, a b, b^2.
        self._sums = np.zeros((len(MEMORIES), len(MARGINS), 6))
        self._tokens = np.zeros(len(MEMORIES))
        self._reference = np.zeros(3)  # of earlier batches: |r - 1|, 1 - p, tokens with a choice

    def add(self, gaps: RecordedGaps) -> list[Sign]:
        """Add a batch, and return what each test now says over each memory, the longest last."""
        known = self._reference[2] >= REFERENCE_TOKENS
        scale = self._reference[0] / self._reference[1] if known else 0.0
        with np.errstate(over="ignore"):
            excess, weight = np.expm1(gaps.replayed - gaps.recorded), -np.expm1(gaps.recorded)
        likelier = gaps.recorded + np.log(gaps.sizes)
        terms = [  # (a, b) of each test
            (excess, np.ones_like(excess)),
            (excess * likelier, likelier**2),
            (np.abs(excess) - scale * weight if known else np.zeros_like(excess), scale * weight),
        ]
        local = [float(len(excess)), np.abs(excess).sum(), weight.sum(), float((weight > 0).sum())]
        for a, b in terms:
            summed_a, summed_b = np.bincount(gaps.sequence, a), np.bincount(gaps.sequence, b)
            local += [a.sum(), b.sum(), (a * a).sum()]
            local += [(summed_a**2).sum(), (summed_a * summed_b).sum(), (summed_b**2).sum()]
        total = gaps.sums([float(value) for value in local])
        if not np.isfinite(total).all():
            return []  # a NaN or an overflow is far beyond the bound on the mean gap, which stops the run
        num = total[0]
        keep = np.array([math.exp(-num / memory) if memory else 0.0 for memory in MEMORIES])
        self._tokens = keep * self._tokens + num
        self._sums = keep[:, None, None] * self._sums + total[4:].reshape(len(MARGINS), 6)
        if known:
            total[1] = min(total[1], REFERENCE_GROWTH * scale * total[2])
        keep_reference = math.exp(-num / max(MEMORIES[-1], REFERENCE_BATCHES * num, 1.0))
        self._reference = keep_reference * self._reference + total[1:4]
        return [
            Sign(test, *_ratio(self._sums[m, t]), int(self._tokens[m]))
            for m in range(len(MEMORIES))
            for t, test in enumerate(MARGINS)
        ]

    def faults(self, signs: list[Sign]) -> list[Sign]:
        """Those that are no chance, the surest first. If there are any, the evidence is gathered anew from then on."""
        found = [sign for sign in signs if sign.is_fault(self._scale)]
        if found:
            self._sums[:], self._tokens[:] = 0.0, 0.0
        return sorted(found, key=lambda sign: -abs(sign.value) / sign.error)


def _ratio(sums: np.ndarray) -> tuple[float, float]:
    """A ratio of sums and its standard error."""
    a, b, aa, seq_aa, seq_ab, seq_bb = sums.tolist()
    if b == 0.0:
        return 0.0, 0.0
    value = a / b
    over_sequences = max(seq_aa - 2 * value * seq_ab + value**2 * seq_bb, 0.0)
    return value, math.sqrt(max(aa, over_sequences)) / b
