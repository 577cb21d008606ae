"""Names what a gap comes from: for each possible cause, undo it and see how much of the gap is left.

Truncation, routes and stale weights are parts of the gap (`gaps`). What is left can be no part of a healthy run, so it
is tried against faults that are known to happen. Those that a running trainer tries too are in `gap_causes`; an engine
in half precision and the steps of training are tried here, where the model is whole and the traces are of many steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...checks.gap_causes import (
    EXPLAINS,
    FEWEST_TOKENS,
    Attempt,
    nothing_explains,
    try_live_routes,
    try_places,
    try_shift,
    try_temperature,
)
from ...checks.recorded_gaps import RecordedGaps
from ...checks.replay_check import Tolerance
from ...policy.model_probe import causal_model
from .gaps import Scored
from .loading import AuditTraces
from .temperature import logprobs_at_temperature
from .token_scores import RecordedTokens, TokenScorer

# Half precision need not round as the engine's does. It is believed when it makes a gap of like size (up to this
# factor) that moves with the one seen.
LIKE_SIZE, MOVES_WITH = 3.0, 0.3

# What replay removes, and what it does not.
EXPECTED = ("truncation", "routes")
FAULTS = ("staleness", "shift", "temperature", "wrong_routes", "half_precision", "place", "unexplained")


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
        source: the traces and where they come from.
        tokens: their recorded tokens, `N`.
        scores: of those tokens.
        parts: `[N]` nats for each part of the gap and for their sum; see `gaps`.
        tolerance: largest gap in nats that counts as rounding; of the mean gap a twentieth of it.
        has_routes: whether recorded experts were replayed.
        scorer: of the model that `scores.closest` comes from.
    """

    source: AuditTraces
    tokens: RecordedTokens
    scores: Scored
    parts: dict[str, np.ndarray]
    tolerance: float
    has_routes: bool
    scorer: TokenScorer


def find_causes(evidence: Evidence) -> list[Finding]:
    """All findings, faults first, then by the gap that they account for."""
    if not len(evidence.tokens):
        return []
    found = _expected(evidence)
    rest = evidence.parts["numerics"]
    fault = _fault(evidence) if _exceeds(rest, evidence.tolerance) else None
    stale = _mean(evidence.parts["staleness"])
    # Weights that do not give the record back, or not after what else was wrong is undone, did not sample it.
    sampled = fault is None or fault.cause != "unexplained"
    if sampled and _exceeds(evidence.parts["staleness"], evidence.tolerance):
        sentence = f"Stale weights: the sampler's weights score {stale:.2g} nats away from the model's on average."
        found.append(Finding("staleness", stale, _mean(rest), sentence))
    found += [] if fault is None else [fault]
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
    wrong = any(attempt.sentence for attempt in _routes(evidence))
    return [finding for finding in found if not (wrong and finding.cause == "routes")]


def _fault(evidence: Evidence) -> Finding:
    """The first cause that explains what is left, or that none does."""
    gap, in_vain = _mean(evidence.parts["numerics"]), []
    own = evidence.scores.replayed.logprobs - evidence.tokens.recorded
    if evidence.scores.sampler is not None and not _exceeds(own, evidence.tolerance):
        sentence = (
            f"The given sampler is not what sampled: its weights score {gap:.2g} nats away from the record on average, "
            f"and the model's own {_mean(own):.2g}. Leave --sampler out, or name the weights that sampled."
        )
        return Finding("unexplained", gap, gap, sentence)
    for attempt in _attempts(evidence):
        if attempt.sentence:
            return Finding(attempt.cause, gap, attempt.left, attempt.sentence, attempt.value)
        in_vain.append(attempt)
    not_tried = ["dropout or another input (images, another prompt) while sampling"]
    if evidence.scores.sampler is None:
        not_tried.insert(0, "other weights (stale ones, another checkpoint): give those that sampled to try them")
    else:
        not_tried.insert(0, "other weights: the given sampler is not what sampled, or one of these is the cause")
    not_tried.append("logits that pass through something that this model does not repeat")
    return Finding("unexplained", gap, gap, nothing_explains(in_vain, gap, not_tried))


def _attempts(evidence: Evidence) -> Iterator[Attempt]:
    """Undone one after another; the costly ones only when the others explain nothing."""
    gaps = _gaps(evidence)
    yield try_shift(gaps)
    yield from _routes(evidence)
    yield try_temperature(
        gaps,
        lambda t: logprobs_at_temperature(
            evidence.tokens, evidence.scores.closest.candidates, evidence.source.temperature, t
        ),
        evidence.source.temperature,
        "the traces say",
    )
    yield from _half_precision(evidence)
    yield from _other_steps(evidence)
    yield from try_places(gaps)


def _gaps(evidence: Evidence) -> RecordedGaps:
    tokens, scored = evidence.tokens, evidence.scores.closest.logprobs
    return RecordedGaps.of(tokens.traces, tokens.trace, tokens.position, scored, tokens.recorded, np.asarray)


def _routes(evidence: Evidence) -> Iterator[Attempt]:
    known = evidence.has_routes and evidence.scores.sampler is None
    if known and _exceeds(evidence.parts["numerics"], evidence.tolerance):
        scores = evidence.scores
        yield try_live_routes(_gaps(evidence), scores.live.logprobs, scores.replayed.agreement)


def _half_precision(evidence: Evidence) -> Iterator[Attempt]:
    model: Any = evidence.scorer.model
    if next(model.parameters()).dtype != torch.float32:
        return
    rest, scored = evidence.parts["numerics"], evidence.scores.closest.logprobs
    gap = _mean(rest)
    for dtype in (torch.bfloat16, torch.float16):
        half_model = copy.deepcopy(model).to(dtype)
        # A forward that was set on the model itself, as trainers do, would still run the model that was copied.
        vars(causal_model(half_model)).pop("forward", None)
        rounded = evidence.scorer.like(half_model)
        half = rounded.score(evidence.tokens, evidence.has_routes).logprobs
        left, size = _mean(half - evidence.tokens.recorded), _mean(half - scored)
        along = float(np.corrcoef(rest, scored - half)[0, 1])
        name, sentence, num = str(dtype).removeprefix("torch."), None, _with_choice(evidence)
        # A correlation of few tokens is chance: its standard error is about 1 / sqrt(num).
        alike = max(gap, size) <= LIKE_SIZE * min(gap, size) and along > max(MOVES_WITH, 4 / math.sqrt(max(num, 1)))
        if (left < EXPLAINS * gap and num >= FEWEST_TOKENS) or alike:
            sentence = (
                f"The engine computed in half precision: the model in {name} is {size:.2g} nats away from itself in "
                f"float32, the record {gap:.2g}, with a correlation of {along:.2f}."
            )
        yield Attempt("half_precision", f"the model in {name}", left, sentence)


def _other_steps(evidence: Evidence) -> Iterator[Attempt]:
    """Look for steps (or shards) that the model fits, where it does not fit the others.

    Other weights are named only where the traces say in which step of training each was sampled, the steps that fit
    stand together, and most completions of the others are off. Else it is told where the gap is, and no more.
    """
    rest, tokens, choice = np.abs(evidence.parts["numerics"]), evidence.tokens, evidence.tokens.supports.sizes > 1
    of_token = evidence.source.steps[tokens.trace]
    steps = np.unique(of_token)
    fits = np.array([not _exceeds(rest[of_token == s], evidence.tolerance) for s in steps])
    # A step whose tokens had no choice fits whatever sampled it.
    told = np.array([(choice & (of_token == s)).sum() >= FEWEST_TOKENS for s in steps])
    fitting, others = steps[fits & told], ~np.isin(of_token, steps[fits])
    if not len(fitting) or not others.any():
        return
    off = np.unique(tokens.trace[others & choice & (rest > evidence.tolerance)])
    most_are_off = 2 * len(off) > len(np.unique(tokens.trace[others & choice]))
    together = len(fitting) == 1 or not (~fits & (steps > fitting[0]) & (steps < fitting[-1])).any()
    name, left = evidence.source.step_name, float(rest[~others].mean())
    if name == "step" and together and most_are_off:
        sentence = (
            f"Other weights: the model fits the traces of {len(fitting)} of {len(steps)} training steps (first: "
            f"{fitting[0]}), and is {rest[others].mean():.2g} nats away from those of the others on average. Traces "
            f"that training saves have weights of their own in each step: --step {fitting[0]} looks at those that this "
            "model sampled."
        )
        yield Attempt("staleness", "without the steps that do not fit", left, sentence)
    else:
        sentence = (
            f"The gap is in some {name}s: {rest[others].mean():.2g} nats on average over {(~fits).sum()} of "
            f"{len(steps)} (first: {steps[~fits][0]}), and {left:.2g} over the others. What is particular to them was "
            "not tried further."
        )
        yield Attempt("place", f"without the {name}s that do not fit", left, sentence)


def _with_choice(evidence: Evidence) -> int:
    """Tokens whose support left a choice: the log-prob of any other is 0 whatever is wrong."""
    return int((evidence.tokens.supports.sizes > 1).sum())


def _mean(values: np.ndarray) -> float:
    return float(np.abs(values).mean()) if len(values) else 0.0


def _exceeds(values: np.ndarray, tolerance: float) -> bool:
    bounds = Tolerance.choose(True, tolerance)
    return bool(len(values)) and not (np.abs(values).max() <= bounds.max and _mean(values) <= bounds.mean)  # NaN: true
