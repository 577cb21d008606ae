"""Names what a gap comes from: for each possible cause, undo it and see how much of the gap is left.

Truncation, routes and stale weights are parts of the gap (`gaps`). What is left can be no part of a healthy run, so it
is tried against faults that are known to happen: records shifted by one, another temperature, routes of other tokens,
an engine in half precision, other weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..replay_check import EXPLAINS, fit_temperature
from .gaps import Scored
from .temperature import logprobs_at_temperature
from .token_scores import RecordedTokens, TokenScorer

# Half precision need not round as the engine's does. It is believed when it makes a gap of like size (up to this
# factor) that moves with the one seen.
LIKE_SIZE, MOVES_WITH = 3.0, 0.3
# Tokens below which a shift that fits can be chance.
FEWEST_SHIFTED = 5

# What replay removes, and what it does not.
EXPECTED = ("truncation", "routes")
FAULTS = ("staleness", "shift", "temperature", "wrong_routes", "half_precision", "other_weights")


@dataclass(frozen=True)
class Finding:
    """One cause.

    Attributes:
        cause: among `EXPECTED` (what replay removes) and `FAULTS` (what it does not).
        gap: mean absolute gap that it accounts for, in nats.
        left: mean absolute gap that is left when it is undone.
        sentence: what was found, with its evidence.
        value: the temperature or the shift that fits; `None` for other causes.
    """

    cause: str
    gap: float
    left: float
    sentence: str
    value: float | None = None

    @property
    def is_fault(self) -> bool:
        return self.cause in FAULTS


@dataclass(frozen=True)
class Evidence:
    """What findings are drawn from.

    Attributes:
        tokens, scores, parts: see `gaps`.
        temperature: the one that the traces name.
        steps: `[N]` int64, the training step (or the shard) of each token.
        scorer: of the model that `scores.closest` comes from.
        tolerance: largest gap in nats that counts as rounding.
        has_routes: whether recorded experts were replayed.
    """

    tokens: RecordedTokens
    scores: Scored
    parts: dict[str, np.ndarray]
    temperature: float
    steps: np.ndarray
    scorer: TokenScorer
    tolerance: float
    has_routes: bool


def find_causes(evidence: Evidence) -> list[Finding]:
    """All findings, faults first, then by the gap that they account for."""
    if not len(evidence.tokens):
        return []
    found = _expected(evidence)
    rest = evidence.parts["numerics"]
    if _exceeds(evidence.parts["staleness"], evidence.tolerance):
        found.append(
            Finding(
                "staleness",
                _mean(evidence.parts["staleness"]),
                _mean(rest),
                f"Stale weights: the sampler's weights score {_mean(evidence.parts['staleness']):.2g} nats away from "
                f"the model's on average.",
            )
        )
    if _exceeds(rest, evidence.tolerance):
        probes: Sequence[Callable[[Evidence], Finding | None]] = (
            _shifted,
            _wrong_routes,
            _other_temperature,
            _half_precision,
            _other_steps,
        )
        found.append(next((f for f in (probe(evidence) for probe in probes) if f), None) or _other_weights(evidence))
    return sorted(found, key=lambda finding: (not finding.is_fault, -finding.gap))


def verdict(findings: Sequence[Finding], tolerance: float) -> str:
    """One sentence: the fault, if there is one, else what replay removes."""
    faults = [finding for finding in findings if finding.is_fault]
    if faults:
        return faults[0].sentence
    names = " and ".join(finding.cause for finding in findings)
    if names:
        return f"All of the gap is {names}, which replay removes; what is left is rounding (below {tolerance:g} nats)."
    return f"There is no gap beyond rounding ({tolerance:g} nats)."


def _expected(evidence: Evidence) -> list[Finding]:
    found = []
    sentences = {
        "truncation": "Truncation: a score over the whole vocabulary is {gap:.2g} nats below the sampler's on average.",
        "routes": "Routes: the live routers choose other experts than the engine did, worth {gap:.2g} nats on average.",
    }
    for cause in EXPECTED:
        part = evidence.parts[cause]
        if _exceeds(part, evidence.tolerance):
            left = _mean(evidence.parts["total"] - part)
            found.append(Finding(cause, _mean(part), left, sentences[cause].format(gap=_mean(part))))
    wrong = evidence.has_routes and _wrong_routes(evidence) is not None
    return [finding for finding in found if not (wrong and finding.cause == "routes")]


def _shifted(evidence: Evidence) -> Finding | None:
    tokens, scored = evidence.tokens, evidence.scores.closest.logprobs
    gap = _mean(evidence.parts["numerics"])
    for shift in (1, -1):
        moved = np.roll(tokens.recorded, -shift)
        both = (np.roll(tokens.trace, -shift) == tokens.trace) & (
            np.roll(tokens.position, -shift) == tokens.position + shift
        )
        left = _mean((scored - moved)[both])
        if both.sum() >= FEWEST_SHIFTED and left < EXPLAINS * gap:
            sentence = (
                f"The recorded log-probs are shifted by one: compared with the record of token t{shift:+d}, the mean "
                f"gap of token t falls from {gap:.2g} to {left:.2g} nats."
            )
            return Finding("shift", gap, left, sentence, float(shift))
    return None


def _wrong_routes(evidence: Evidence) -> Finding | None:
    if not evidence.has_routes or evidence.scores.sampler is not None:
        return None
    gap = _mean(evidence.parts["numerics"])
    left = _mean(evidence.parts["numerics"] + evidence.parts["routes"])
    if not (_exceeds(evidence.parts["numerics"], evidence.tolerance) and left < EXPLAINS * gap):
        return None
    agreement = evidence.scores.replayed.agreement
    sentence = (
        f"The recorded routes are not those of these tokens: through the live routers the mean gap falls from "
        f"{gap:.2g} to {left:.2g} nats, and they agree with {agreement:.0%} of the recorded experts."
    )
    return Finding("wrong_routes", gap, left, sentence)


def _other_temperature(evidence: Evidence) -> Finding | None:
    gap = _mean(evidence.parts["numerics"])
    best, left = fit_temperature(
        lambda t: _mean(
            logprobs_at_temperature(evidence.tokens, evidence.scores.closest.candidates, evidence.temperature, t)
            - evidence.tokens.recorded
        ),
        evidence.temperature / 4,
        evidence.temperature * 4,
    )
    if left >= EXPLAINS * gap:
        return None
    sentence = (
        f"The engine sampled at another temperature: at temperature={best:.3g} the mean gap falls from {gap:.2g} to "
        f"{left:.2g} nats, and the traces say temperature={evidence.temperature:g}."
    )
    return Finding("temperature", gap, left, sentence, best)


def _half_precision(evidence: Evidence) -> Finding | None:
    model: Any = evidence.scorer.model
    if next(model.parameters()).dtype != torch.float32:
        return None
    rest, scored = evidence.parts["numerics"], evidence.scores.closest.logprobs
    gap = _mean(rest)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = evidence.scorer.like(copy.deepcopy(model).to(dtype))
        half = rounded.score(evidence.tokens, evidence.has_routes).logprobs
        left, size = _mean(half - evidence.tokens.recorded), _mean(half - scored)
        along = float(np.corrcoef(rest, scored - half)[0, 1])
        if left < EXPLAINS * gap or (max(gap, size) <= LIKE_SIZE * min(gap, size) and along > MOVES_WITH):
            name = str(dtype).removeprefix("torch.")
            sentence = (
                f"The engine computed in half precision: the model in {name} is {size:.2g} nats away from itself in "
                f"float32, the record {gap:.2g}, with a correlation of {along:.2f}."
            )
            return Finding("half_precision", gap, left, sentence)
    return None


def _other_steps(evidence: Evidence) -> Finding | None:
    rest = np.abs(evidence.parts["numerics"])
    fits = {int(s): rest[evidence.steps == s].max() <= evidence.tolerance for s in np.unique(evidence.steps)}
    fitting = [step for step, fit in fits.items() if fit]
    if not fitting:
        return None
    others = ~np.isin(evidence.steps, fitting)
    sentence = (
        f"Stale weights, or training: the model fits the traces of {len(fitting)} of {len(fits)} steps "
        f"(first: {fitting[0]}), and the rest, {rest[others].mean():.2g} nats away on average, were sampled with other "
        "weights. So it is with traces saved while training, whose steps have weights of their own: "
        f"--step {fitting[0]} looks at the ones that this model sampled."
    )
    return Finding("staleness", float(rest.mean()), float(rest[~others].mean()), sentence)


def _other_weights(evidence: Evidence) -> Finding:
    gap = _mean(evidence.parts["numerics"])
    known = evidence.scores.sampler is not None
    sentence = (
        f"Other weights: {gap:.2g} nats on average that no shift, temperature"
        f"{', routes' if evidence.has_routes else ''} or half precision explains, so the "
        f"{'given sampler' if known else 'model'} is not what sampled"
        f"{'.' if known else ': stale weights, or another checkpoint. Give the weights that sampled to see.'}"
    )
    return Finding("other_weights", gap, gap, sentence)


def _mean(values: np.ndarray) -> float:
    return float(np.abs(values).mean()) if len(values) else 0.0


def _exceeds(values: np.ndarray, tolerance: float) -> bool:
    return bool(len(values)) and not np.abs(values).max() <= tolerance  # also true for NaN
