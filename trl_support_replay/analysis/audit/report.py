"""An audit as plain data: what `audit.json` holds, and the page shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..._version import __version__
from .gaps import PARTS
from .run import Audit

# |gap| in nats, two bins a decade; what is smaller or larger counts in the first or last bin.
EDGES = [round(10 ** (exponent / 2), 12) for exponent in range(-16, 5)]
_QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}

TokenText = Callable[[int], str]


def build_report(audit: Audit, **about: Any) -> dict[str, Any]:
    """Everything but the token view, as JSON-ready values. Log-probs and gaps are in nats.

    Args:
        audit: what was found.
        about: further entries that say what was audited (`model`, `sampler`).
    """
    source = audit.source
    sizes = audit.tokens.supports.sizes
    return {
        "version": __version__,
        **about,
        "origins": source.origins,
        "temperature": source.temperature,
        "tolerance": audit.tolerance,
        "num_saved": source.num_saved,
        "num_traces": len(source.traces),
        "num_tokens": len(audit.tokens),
        "num_singletons": int((sizes == 1).sum()),
        "routes": audit.has_routes,
        "route_agreement": _number(audit.scores.replayed.agreement),
        "has_sampler": audit.scores.sampler is not None,
        "verdict": audit.verdict,
        "findings": [
            {
                "cause": f.cause,
                "fault": f.is_fault,
                "gap": _number(f.gap),
                "left": _number(f.left),
                "value": _number(f.value),
                "sentence": f.sentence,
            }
            for f in audit.findings
        ],
        "parts": {name: _summary(audit.parts[name]) for name in ("total", *PARTS)},
        "histogram": {
            "edges": EDGES,
            "counts": {name: _histogram(audit.parts[name]) for name in ("total", *PARTS)},
        },
        "sequences": _sequences(audit),
        "step_name": source.step_name,
        "steps": _steps(audit),
    }


def round_number(value: float | None, digits: int = 5) -> float | None:
    """To `digits` significant digits, so that a page stays small; `None` for what JSON has no number for."""
    return None if value is None or not np.isfinite(value) else float(f"{value:.{digits}g}")


def _number(value: float | None) -> float | None:
    return round_number(value, 7)


def _summary(values: np.ndarray) -> dict[str, float | None]:
    """Of `[N]` signed gaps: mean, and of their absolute values mean, quantiles and maximum; `None` without tokens."""
    size = np.abs(values)
    if not len(values):
        return dict.fromkeys(("mean", "mean_abs", *_QUANTILES, "max_abs"))
    return {
        "mean": _number(values.mean()),
        "mean_abs": _number(size.mean()),
        **{name: _number(np.quantile(size, q)) for name, q in _QUANTILES.items()},
        "max_abs": _number(size.max()),
    }


def _histogram(values: np.ndarray) -> list[int]:
    inside = np.clip(np.abs(values), EDGES[0], EDGES[-1] * (1 - 1e-9))
    return np.histogram(inside, bins=EDGES)[0].tolist()


def _sequences(audit: Audit) -> list[dict[str, Any]]:
    """For each trace, logs of its sequence's importance ratio right after generation.

    `stock` is over the whole vocabulary. `mass` is its closed form: without any other gap than truncation, a ratio is
    the product of the masses that the supports hold. `replayed` is over the supports, through the recorded experts.
    """
    num = len(audit.source.traces)

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(audit.tokens.trace, weights=values, minlength=num)

    tokens = np.bincount(audit.tokens.trace, minlength=num)
    stock, mass = total(audit.parts["total"]), total(audit.scores.live.log_mass)
    replayed = total(audit.scores.replayed.logprobs - audit.tokens.recorded)
    return [
        {
            "trace": b,
            "step": int(audit.source.steps[b]),
            "tokens": int(tokens[b]),
            "stock": _number(stock[b]),
            "mass": _number(mass[b]),
            "replayed": _number(replayed[b]),
        }
        for b in range(num)
        if tokens[b]
    ]


def _steps(audit: Audit) -> list[dict[str, Any]]:
    """For each training step: sizes and masses of the supports, and the gap that replay leaves."""
    sizes, mass = audit.tokens.supports.sizes, np.exp(audit.scores.live.log_mass)
    left = np.abs(audit.scores.replayed.logprobs - audit.tokens.recorded)
    of_token = audit.source.steps[audit.tokens.trace]
    rows = []
    for step in np.unique(of_token):
        at = of_token == step
        rows.append(
            {
                "step": int(step),
                "tokens": int(at.sum()),
                "size_mean": _number(sizes[at].mean()),
                "size_max": int(sizes[at].max()),
                "singletons": _number((sizes[at] == 1).mean()),
                "mass_mean": _number(mass[at].mean()),
                "mass_min": _number(mass[at].min()),
                "left_mean": _number(left[at].mean()),
                "left_max": _number(left[at].max()),
            }
        )
    return rows
