"""Columns of TRL's completions table that say what each completion was sampled from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..traces.columns import Trace

_NAMES = ("support_size_mean", "support_size_max", "support_singletons", "sampling_logprob_mean")


def completion_columns(samples: Sequence[Trace]) -> dict[str, list[float | None]]:
    """A value for each of `B` completions, by column; `None` where nothing was sampled with a support.

    Columns: mean and largest size of its supports, the fraction of them that hold one token, and the mean log-prob of
    its sampled tokens over their supports, in nats.
    """
    rows = [_row(sample) for sample in samples]
    return {name: [row[i] for row in rows] for i, name in enumerate(_NAMES)}


def empty_columns(num_completions: int) -> dict[str, list[float | None]]:
    """The same columns for completions without supports, those of an evaluation."""
    return {name: [None] * num_completions for name in _NAMES}


def _row(sample: Trace) -> tuple[float | None, ...]:
    on = sample.supports.sizes > 0
    if not on.any():
        return (None,) * len(_NAMES)
    sizes = sample.supports.sizes[on]
    logprob = float(np.mean(sample.sampling_logprobs[on]))
    # Rounded for a table that people read.
    return round(float(sizes.mean()), 2), float(sizes.max()), round(float(np.mean(sizes == 1)), 3), round(logprob, 4)
