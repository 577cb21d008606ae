"""Finds the cause of a gap between replayed and recorded log-probs: undo one cause after another, see what is left.

The trainer's check (over all processes, with a model that may be sharded) and the audit (of saved traces) try the same
causes on the same data: flat arrays of recorded tokens. A cause is believed only when it was undone and little of the
gap was left. The report lists the other causes too, each with the gap that it left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .recorded_gaps import RecordedGaps

# A cause is believed when undoing it leaves less than this part of the gap.
EXPLAINS = 0.1
# With fewer tokens that had a choice, a cause may fit by chance.
FEWEST_TOKENS = 5


@dataclass(frozen=True)
class Attempt:
    """A cause that was undone.

    Attributes:
        cause: its name.
        undone: what was done, as a list of attempts shows it.
        left: mean absolute gap in nats after that.
        sentence: the finding, where the cause explains the gap; else `None`.
        value: the temperature or the shift that was tried; `None` for other causes.
    """

    cause: str
    undone: str
    left: float
    sentence: str | None = None
    value: float | None = None


def try_shift(gaps: RecordedGaps) -> Attempt:
    """Compare each token with the records of its neighbours; the better of the two."""
    attempts = []
    gap, _ = gaps.mean(gaps.replayed - gaps.recorded)
    for shift in (1, -1):
        both = (np.roll(gaps.sequence, -shift) == gaps.sequence) & (
            np.roll(gaps.position, -shift) == gaps.position + shift
        )
        left, count = gaps.mean((gaps.replayed - np.roll(gaps.recorded, -shift))[both])
        sentence = None
        if count >= FEWEST_TOKENS and left < EXPLAINS * gap:
            sentence = (
                f"The recorded log-probs are shifted by one: compared with the record of token t{shift:+d}, the mean "
                f"gap of token t falls from {gap:.2g} to {left:.2g} nats."
            )
        attempts.append(Attempt("shift", f"records shifted by {shift:+d}", left, sentence, float(shift)))
    return min(attempts, key=lambda attempt: attempt.left)


def try_temperature(
    gaps: RecordedGaps, replay_at: Callable[[float], np.ndarray], temperature: float, said_by: str
) -> Attempt:
    """Fit a temperature between a quarter and four times the known one.

    Args:
        gaps: the tokens.
        replay_at: `[N]` replayed log-probs at a temperature.
        temperature: the known one.
        said_by: where the known one comes from, as in "the traces say".
    """
    gap, _ = gaps.mean(gaps.replayed - gaps.recorded)
    best, left = fit_temperature(lambda t: gaps.mean(replay_at(t) - gaps.recorded)[0], temperature / 4, temperature * 4)
    sentence = None
    if left < EXPLAINS * gap and _with_choice(gaps) >= FEWEST_TOKENS:
        sentence = (
            f"The engine sampled at another temperature: at temperature={best:.3g} the mean gap falls from {gap:.2g} "
            f"to {left:.2g} nats, and {said_by} temperature={temperature:g}. A factor of the logits that one side "
            "leaves out looks the same."
        )
    return Attempt("temperature", f"temperature={best:.3g}", left, sentence, best)


def try_live_routes(gaps: RecordedGaps, live: np.ndarray, agreement: float | None = None) -> Attempt:
    """Score through the live routers in place of the recorded experts.

    Args:
        gaps: the tokens, replayed through the recorded experts.
        live: `[N]` log-probs through the live routers.
        agreement: fraction of the recorded experts that the live routers choose too, where it is known.
    """
    gap, _ = gaps.mean(gaps.replayed - gaps.recorded)
    left, _ = gaps.mean(live - gaps.recorded)
    sentence = None
    if left < EXPLAINS * gap and _with_choice(gaps) >= FEWEST_TOKENS:
        agree = "" if agreement is None else f", and they agree with {agreement:.0%} of the recorded experts"
        sentence = (
            f"The recorded routes are not those of these tokens: through the live routers the mean gap falls from "
            f"{gap:.2g} to {left:.2g} nats{agree}."
        )
    return Attempt("wrong_routes", "live routers in place of the recorded routes", left, sentence)


def try_again(gaps: RecordedGaps, again: np.ndarray, rounding: float) -> Attempt:
    """Score the batch once more in the same way: only noise can make a difference.

    Args:
        gaps: the tokens.
        again: `[N]` log-probs of the second scoring.
        rounding: mean difference in nats that counts as rounding, not as noise.
    """
    gap, _ = gaps.mean(gaps.replayed - gaps.recorded)
    left, _ = gaps.mean(again - gaps.recorded)
    apart, _ = gaps.mean(again - gaps.replayed)
    sentence = None
    if left < EXPLAINS * gap or apart > max(gap / 2, rounding):
        sentence = (
            f"The policy's own scores are noisy: scored again, the same batch is {apart:.2g} nats from its first "
            f"scores on average. The gap to the record was {gap:.2g} and is {left:.2g} then. Dropout (lora_dropout, "
            "attention_dropout, ...) and NEFTune do that."
        )
    return Attempt("noise", f"scored again ({apart:.2g} from the first scores)", left, sentence)


def try_places(gaps: RecordedGaps) -> list[Attempt]:
    """Leave out the tokens of one place after another: the places that known faults are limited to."""
    difference = gaps.replayed - gaps.recorded
    gap, _ = gaps.mean(difference)
    counts = np.bincount(gaps.sequence)
    worst = np.bincount(gaps.sequence, np.abs(difference)) > gap * counts
    places = {
        "the turns after the first one": gaps.later_turn,
        # The largest size in each process; with a top-k these are the rows that it cuts.
        "the supports of the largest size, where a top-k cuts and ties are broken": (
            (gaps.sizes == gaps.sizes.max(initial=0)) & (gaps.sizes > 1)
        ),
        "some of the completions": worst[gaps.sequence],
    }
    attempts = []
    for name, inside in places.items():
        left, others = gaps.mean(difference[~inside])
        within, count = gaps.mean(difference[inside])
        sentence = None
        if count and others >= max(FEWEST_TOKENS, count) and left < EXPLAINS * gap:
            sentence = (
                f"The gap is in {name}: {within:.2g} nats on average over these {count} tokens, and {left:.2g} over "
                f"the other {others}. What is particular to them was not tried further."
            )
        if count:
            attempts.append(Attempt("place", f"without {name}", left, sentence))
    return attempts


def _with_choice(gaps: RecordedGaps) -> int:
    """Tokens of all processes whose support left a choice: the log-prob of any other is 0 whatever is wrong."""
    return gaps.mean(gaps.recorded[gaps.sizes > 1])[1]


def nothing_explains(attempts: Sequence[Attempt], gap: float, not_tried: Sequence[str]) -> str:
    """The finding when no cause explains the gap: what was tried, and what was not.

    Args:
        attempts: those that explain nothing.
        gap: mean absolute gap in nats.
        not_tried: what else can be the cause.
    """
    tried = "; ".join(f"{attempt.undone}: {attempt.left:.2g}" for attempt in attempts)
    return (
        f"Nothing that was tried explains the mean gap of {gap:.2g} nats. Tried, with the mean gap that is left: "
        f"{tried}. Not tried: {'; '.join(not_tried)}."
    )


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
