"""Metrics of supports and routes that add up correctly over micro-batches, steps and processes.

A mean of means is wrong where their numbers of tokens differ. So a metric keeps its sum and count (or its extreme) over
micro-batches, steps and processes, and becomes one number when it is logged. TRL averages what it is given over the
passes of a logging step: it is given that one number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..routing import RouteMetrics
from ..traces.columns import Trace

GatherRow = Callable[[Sequence[float]], np.ndarray]
"""Gathers `n` numbers from every process into `[processes, n]` float64."""

_JOIN = {"mean": np.add, "sum": np.add, "max": np.maximum, "min": np.minimum}
_NOTHING = {"max": -math.inf, "min": math.inf}


@dataclass(frozen=True)
class Metric:
    """A number that can be joined with the same number of other tokens.

    Attributes:
        kind: how it is joined: "mean", "sum", "max" or "min".
        parts: what is kept: total and count of a mean, otherwise the number itself.
    """

    kind: str
    parts: tuple[float, ...]

    def join(self, *others: Metric) -> Metric:
        """This number over its own tokens and those of the others."""
        parts = [self.parts, *(other.parts for other in others)]
        return Metric(self.kind, tuple(_JOIN[self.kind].reduce(np.array(parts, np.float64), axis=0).tolist()))

    @property
    def value(self) -> float:
        """What is logged; NaN where nothing was counted, which TRL logs as `None`."""
        if self.kind == "mean":
            total, count = self.parts
            return total / count if count else math.nan
        return math.nan if self.parts[0] == _NOTHING.get(self.kind) else self.parts[0]


Metrics = Mapping[str, Metric]


def mean(total: float, count: float) -> Metric:
    """A mean, from a total and the number of what was added up."""
    return Metric("mean", (float(total), float(count)))


def count(number: float) -> Metric:
    """A number of events, added up."""
    return Metric("sum", (float(number),))


def largest(values: np.ndarray) -> Metric:
    """The largest of `values`, of which there may be none."""
    return Metric("max", (float(np.max(np.asarray(values, np.float64), initial=_NOTHING["max"])),))


def over_processes(metrics: Metrics, gather: GatherRow) -> dict[str, Metric]:
    """The same metrics over the tokens of all processes, each of which calls this with the same names."""
    rows = gather([part for metric in metrics.values() for part in metric.parts])
    joined, start = {}, 0
    for name, metric in metrics.items():
        stop = start + len(metric.parts)
        first, *rest = (Metric(metric.kind, tuple(row[start:stop].tolist())) for row in rows)
        joined[name] = first.join(*rest)
        start = stop
    return joined


class StepMetrics:
    """The metrics of one logging step."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def add(self, metrics: Metrics) -> None:
        """Join with metrics of another pass or batch; they are already summed over all processes."""
        for name, metric in metrics.items():
            self._metrics[name] = metric.join(self._metrics[name]) if name in self._metrics else metric

    def take(self) -> dict[str, list[float]]:
        """The step's numbers, one per metric, in TRL's form; starts the next step."""
        values = {name: [metric.value] for name, metric in self._metrics.items()}
        self._metrics = {}
        return values


def support_metrics(samples: Sequence[Trace], repaired: int, num_synthetic: int) -> dict[str, Metric]:
    """Sizes of the supports of one generation batch, of this process.

    Args:
        samples: the completions.
        repaired: how many of their supports were repaired, or lack or may lack members.
        num_synthetic: how many end in a token that nobody sampled.
    """
    sizes = np.concatenate([np.zeros(0, np.int64), *(sample.supports.sizes for sample in samples)])
    sizes = sizes[sizes > 0]
    return {
        "support/tokens": count(len(sizes)),
        "support/size_mean": mean(sizes.sum(), len(sizes)),
        "support/size_max": largest(sizes),
        "support/singleton_fraction": mean((sizes == 1).sum(), len(sizes)),
        "support/repaired": count(repaired),
        "support/synthetic_eos": count(num_synthetic),
    }


def route_metrics(found: RouteMetrics) -> dict[str, Metric]:
    """Agreement of the live routers with the replayed routes, over all layers and layer by layer, of this process."""
    experts, num_layers = found.captured * found.top_k, len(found.layers)
    return {
        "routes/agreement": mean(sum(found.same), experts * num_layers),
        "routes/order_mismatch": mean(found.reordered, found.captured * num_layers),
        "routes/uncaptured": count(found.uncaptured),
        **{
            f"routes/agreement_layer_{layer}": mean(same, experts)
            for layer, same in zip(found.layers, found.same, strict=True)
        },
    }
