"""Counts how many of the replayed experts the live router would have chosen too."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .devices import stack_across_devices


@dataclass(frozen=True)
class RouteMetrics:
    """Counts over the captured positions of some forwards. Padding is in none of them.

    The metrics of further forwards or ranks with the same layers can be added, and the fractions are then those over
    all of their positions.

    Attributes:
        layers: global layer numbers, `L`.
        top_k: number of experts of a position in a layer, `k`.
        same: for each layer, number of replayed experts that the live router would have chosen too.
        reordered: number of (position, layer) whose experts are the live router's, in another order. The order only
            changes the rounding of the sum over experts.
        captured: number of positions with a recorded route.
        uncaptured: number of positions that took the live router's choice.
    """

    layers: tuple[int, ...]
    top_k: int
    same: tuple[int, ...]
    reordered: int
    captured: int
    uncaptured: int

    def __add__(self, other: RouteMetrics) -> RouteMetrics:
        if (self.layers, self.top_k) != (other.layers, other.top_k):
            raise ValueError(
                f"Metrics of the layers {self.layers} with {self.top_k} experts and of the layers {other.layers} with "
                f"{other.top_k} cannot be added."
            )
        return RouteMetrics(
            self.layers,
            self.top_k,
            tuple(a + b for a, b in zip(self.same, other.same, strict=True)),
            self.reordered + other.reordered,
            self.captured + other.captured,
            self.uncaptured + other.uncaptured,
        )

    @property
    def agreement(self) -> float:
        """Fraction of the replayed experts that the live router would have chosen too; NaN where none was captured."""
        return _fraction(sum(self.same), self.captured * self.top_k * len(self.layers))

    @property
    def agreement_per_layer(self) -> tuple[float, ...]:
        """The same, layer by layer."""
        return tuple(_fraction(same, self.captured * self.top_k) for same in self.same)

    @property
    def order_mismatch(self) -> float:
        """Fraction of (position, layer) that are `reordered`."""
        return _fraction(self.reordered, self.captured * len(self.layers))


def _fraction(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")


class RouteCounter:
    """Adds up agreement on the device; nothing is synchronised before `metrics`."""

    def __init__(self, layers: tuple[int, ...], top_k: int):
        self.layers, self.top_k = layers, top_k
        self.same: list[torch.Tensor] = []
        self.reordered: list[torch.Tensor] = []
        self.columns: list[int] = []

    def add(self, column: int, live: torch.Tensor, routes: torch.Tensor, captured: torch.Tensor) -> None:
        """Compare one router call.

        Args:
            column: index of the layer.
            live: `[N, k]` the live router's experts.
            routes: `[N, k]` the experts used.
            captured: bool `[N]`.
        """
        common = (live[:, :, None] == routes[:, None, :]).sum(dim=(1, 2))
        reordered = (common == self.top_k) & (live != routes).any(dim=1)
        self.columns.append(column)
        self.same.append((common * captured).sum())
        self.reordered.append((reordered & captured).sum())

    def metrics(self, captured: int, uncaptured: int) -> RouteMetrics:
        """The metrics; `captured` and `uncaptured` are positions, over all forwards."""
        same = torch.zeros(len(self.layers), dtype=torch.int64)
        reordered = 0
        if self.columns:
            both = torch.stack([stack_across_devices(self.same), stack_across_devices(self.reordered)]).cpu()
            same.index_add_(0, torch.tensor(self.columns), both[0])
            reordered = int(both[1].sum())
        return RouteMetrics(self.layers, self.top_k, tuple(same.tolist()), reordered, captured, uncaptured)
