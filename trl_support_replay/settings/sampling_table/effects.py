"""The classes of settings, and when a setting of a class is refused."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple


class Effect(Enum):
    """What a setting does. The value is the phrase for documentation."""

    NONE = "no effect on the distribution"
    SCALES = "is the temperature, which the trainer scores with"
    TRUNCATES = "cuts the distribution; the support is recorded and replayed"
    REMOVES = "removes tokens by a rule"
    SHIFTS = "shifts logits by a function of the tokens so far"
    FIXES = "fixes a token"
    REPORTS = "no effect on the distribution, but on what the engine reports"
    UNREPLAYABLE = "cannot be replayed"


# Why the values of a class are refused, where a field gives no reason of its own.
_REASONS = {
    Effect.REMOVES: "it removes tokens by a rule, and the trainer does not score over what is left",
    Effect.SHIFTS: "it shifts logits in a way that the trainer does not repeat",
    Effect.FIXES: "it fixes tokens, and the trainer scores them as if they were drawn",
}


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
        recorded: whether its effect is in the recorded support, for `Effect.REMOVES`. Such a setting is exact as soon
            as supports are recorded, that is, when something truncates as well.
    """

    effect: Effect
    off: tuple[Any, ...] = (None,)
    reason: str = ""
    recorded: bool = False

    def is_off(self, value: Any) -> bool:
        """Whether `value` leaves everything as it is without this setting."""
        value = getattr(value, "value", value)  # an enumeration in some versions, its value in others
        return any(value is off or (off is not None and value == off) for off in self.off)

    @property
    def replayed(self) -> bool:
        """Whether any value is replayed exactly when supports are recorded."""
        return self.effect in (Effect.NONE, Effect.SCALES, Effect.TRUNCATES) or self.recorded

    def refused(self, value: Any, truncates: bool = True, replays: bool = True) -> Refused | None:
        """Why `value` is refused; `None` when it is not.

        Args:
            value: of the setting.
            truncates: whether supports are recorded.
            replays: whether anything is recorded, supports or routed experts.
        """
        if self.is_off(value) or (self.replayed and (truncates or not self.recorded)):
            return None
        if self.effect is Effect.REPORTS and not replays:
            return None
        if self.recorded:
            return Refused(
                "it removes tokens, and with nothing truncated the trainer scores over the whole vocabulary",
                "Leave it out, or set top_k, top_p or min_p as well, so that supports are recorded",
            )
        return Refused(self.reason or _REASONS[self.effect], "Leave it out")


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


def removes(*off: Any, recorded: bool = False) -> Field:
    return Field(Effect.REMOVES, (None, *off), recorded=recorded)


def shifts(*off: Any) -> Field:
    return Field(Effect.SHIFTS, (None, *off))


def fixes(*off: Any) -> Field:
    return Field(Effect.FIXES, (None, *off))


def reports(reason: str, *off: Any) -> Field:
    return Field(Effect.REPORTS, off, reason)


def unreplayable(reason: str, *off: Any) -> Field:
    return Field(Effect.UNREPLAYABLE, (None, *off), reason)
