"""The classes of settings, and when a setting of a class is refused."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple


class Effect(Enum):
    """What a setting does. The value is the phrase for documentation."""

    NONE = "no effect on the distribution"
    SCALES = "is the temperature, which the trainer scores with"
    TRUNCATES = "cuts unlikely tokens"
    REMOVES = "removes tokens by a rule"
    FIXES = "fixes a token, whose support is then itself alone"
    SHIFTS = "shifts logits by a known function"
    REPORTS = "no effect on the distribution, but on what the engine reports"
    UNREPLAYABLE = "cannot be replayed"


# What these leave is what the engine reports as the support of a token.
_NARROWING = (Effect.TRUNCATES, Effect.REMOVES, Effect.FIXES)
_SHIFTS = (
    "it shifts logits, and scoring repeats that only in training with colocated vLLM, beside a setting that cuts "
    "tokens, with finite values, kl_scope='support', and neither save_traces nor support_growth"
)


class Refused(NamedTuple):
    """Why a value is refused, and what to do."""

    reason: str
    remedy: str


@dataclass(frozen=True)
class Field:
    """One setting.

    Attributes:
        effect: its class.
        off: values at which it does nothing.
        reason: why other values are refused; empty for the reason of the class.
        removes: for a bias, which of its values only remove tokens.
    """

    effect: Effect
    off: tuple[Any, ...] = (None,)
    reason: str = ""
    removes: Callable[[Any], bool] | None = None

    def is_off(self, value: Any) -> bool:
        """Whether `value` leaves everything as it is without this setting."""
        value = getattr(value, "value", value)  # an enumeration in some versions, its value in others
        return any(value is off or (off is not None and value == off) for off in self.off)

    def narrows(self, value: Any) -> bool:
        """Whether `value` leaves a support that has to be recorded and replayed."""
        if self.is_off(value):
            return False
        return self.effect in _NARROWING or (self.removes is not None and self.removes(value))

    @property
    def replayed(self) -> bool:
        """Whether any value is replayed exactly."""
        return self.effect in (Effect.NONE, Effect.SCALES, *_NARROWING)

    def refused(self, value: Any, replays: bool = True) -> Refused | None:
        """Why `value` is refused; `None` when it is not.

        Args:
            value: of the setting.
            replays: whether anything is recorded, supports or routed experts.
        """
        if self.is_off(value) or self.replayed or self.narrows(value):
            return None
        if self.effect is Effect.REPORTS and not replays:
            return None
        return Refused(self.reason or _SHIFTS, "Leave it out")


def unknown(name: str, known: Collection[str]) -> Refused:
    """The refusal of a setting that is in no table, which may be misspelt."""
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.8)
    return Refused(
        "it is unknown here, and so is what it does to the tokens that are drawn",
        f"Did you mean {close[0]}? Else leave it out" if close else "Leave it out",
    )


def harmless(names: str) -> dict[str, Field]:
    """Fields without an effect on the distribution or on what is recorded, by their names."""
    return dict.fromkeys(names.split(), Field(Effect.NONE))


def truncates(*off: Any) -> Field:
    return Field(Effect.TRUNCATES, (None, *off))


def removes(*off: Any) -> Field:
    return Field(Effect.REMOVES, (None, *off))


def shifts(*off: Any) -> Field:
    return Field(Effect.SHIFTS, (None, *off))


def biases() -> Field:
    """A mapping, or a list of pairs, whose values are added to logits: one of -inf only removes the token."""
    return Field(
        Effect.SHIFTS, (None, {}, []), f"{_SHIFTS}; a bias of -inf only removes the token", _all_minus_infinity
    )


def _all_minus_infinity(biases: Any) -> bool:
    try:
        values = biases.values() if isinstance(biases, Mapping) else [bias for _, bias in biases]
    except (TypeError, ValueError):
        return False
    return all(bias == -math.inf for bias in values)


def fixes(*off: Any) -> Field:
    return Field(Effect.FIXES, (None, *off))


def reports(reason: str, *off: Any) -> Field:
    return Field(Effect.REPORTS, off, reason)


def unreplayable(reason: str, *off: Any) -> Field:
    return Field(Effect.UNREPLAYABLE, (None, *off), reason)
