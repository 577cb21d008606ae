"""Recorded routes around the model calls of a trainer: opened before a forward, closed after its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..batch.layout import first_columns
from ..routing import RouteBatch, RouteMetrics, RouterReplay
from ..traces.columns import Trace
from ..traces.routes import RoutedExperts, RoutesError


class RouteSessions:
    """The router replays of the models that a trainer calls (policy, reference), made when first needed.

    They are not made earlier, since finding the routers runs the model once, which needs the model as it is sharded.
    """

    def __init__(self) -> None:
        self._replays: dict[int, RouterReplay] = {}

    def of(self, model: Any) -> RouterReplay:
        """The `RouterReplay` of `model`. Every process has to call this at the same time."""
        if id(model) not in self._replays:
            self._replays[id(model)] = RouterReplay(model)
        return self._replays[id(model)]

    def check(self, model: Any, samples: Sequence[Trace]) -> None:
        """Refuse samples whose routes cannot be replayed in `model`.

        Raises:
            RoutesError: naming the sample and the numbers: without routes, or not one row of them a token of prompt and
                completion, or of other layers or another number of experts.
        """
        router = self.of(model)
        for b, routes in enumerate(_routes_of(samples)):
            num_tokens = len(samples[b].prompt_ids) + len(samples[b].completion_ids)
            routes.check(
                num_tokens=num_tokens,
                layers=router.layers,
                top_k=router.top_k,
                num_experts=router.num_experts,
                where=f"sample {b}",
            )

    def open(
        self,
        model: Any,
        samples: Sequence[Trace],
        width: int,
        completion_length: int,
        batch_size: int,
    ) -> None:
        """Replay the samples' routes in the next `ceil(B / batch_size)` forwards of `model`.

        Args:
            model: as it will be called.
            samples: `B` samples; prompts are padded on the left and completions on the right.
            width: `S`, columns of the batch.
            completion_length: number of completion columns.
            batch_size: samples a forward.
        """
        routes = _routes_of(samples)
        starts = first_columns(samples, width, completion_length)
        self.of(model).open(*RouteBatch.from_samples(routes, starts, width).split(batch_size))

    def close(self, model: Any) -> RouteMetrics | None:
        """Close what is open on `model`; `None` when nothing is."""
        replay = self._replays.get(id(model))
        return replay.close() if replay is not None and replay.is_open else None

    def discard(self) -> None:
        """Leave every model as it was, whatever happened."""
        for replay in self._replays.values():
            replay.discard()


def _routes_of(samples: Sequence[Trace]) -> list[RoutedExperts]:
    routes = []
    for b, sample in enumerate(samples):
        if sample.routes is None:
            raise RoutesError(f"Sample {b} has no routes, which routed_experts_replay=True asks for.")
        routes.append(sample.routes)
    return routes
