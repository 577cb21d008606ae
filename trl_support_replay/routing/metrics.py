"""How far the live router agrees with the routes that are replayed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .devices import stack_across_devices


@dataclass(frozen=True)
class RouteMetrics:
    """Counts over the captured positions of the forwards of one scope. Padding is in none of them.

    Attributes:
        layers: global layer numbers, `L`.
        agreement: fraction of replayed experts that the live router would have chosen too, over all layers.
            `nan` when nothing was captured.
        agreement_per_layer: the same, layer by layer.
        order_mismatch: fraction of (position, layer) whose experts are the live router's, in another order. The order
            only changes the rounding of the sum over experts.
        captured: number of positions with a recorded route.
        uncaptured: number of positions that took the live router's choice.
    """

    layers: tuple[int, ...]
    agreement: float
    agreement_per_layer: tuple[float, ...]
    order_mismatch: float
    captured: int
    uncaptured: int


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
        if not captured:
            nan = float("nan")
            return RouteMetrics(self.layers, nan, (nan,) * len(self.layers), nan, 0, uncaptured)
        per_layer = tuple((same.double() / (captured * self.top_k)).tolist())
        return RouteMetrics(
            layers=self.layers,
            agreement=sum(per_layer) / len(per_layer),
            agreement_per_layer=per_layer,
            order_mismatch=reordered / (captured * len(self.layers)),
            captured=captured,
            uncaptured=uncaptured,
        )
