"""State while routes are replayed: the forward that a router call belongs to, and the experts it uses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .batch import RouteBatch
from .discovery import Router
from .errors import RouterReplayError
from .intercept import Patch, in_backward
from .metrics import RouteCounter, RouteMetrics


class OpenRoutes:
    """State of the routes that are open."""

    def __init__(
        self, routers: tuple[Router, ...], layers: tuple[int, ...], batches: list[RouteBatch], patch: Patch
    ) -> None:
        self.routers, self.batches, self.patch = routers, batches, patch
        self.calls = [0] * len(routers)
        self.ended = False
        self.counter = RouteCounter(layers, routers[0].top_k)
        # (column, batch) -> the experts a forward used, where the live router filled some in. A layer that runs again
        # has to use the same ones, even if rounding would now tip its router the other way.
        self.used: dict[tuple[int, int], torch.Tensor] = {}
        self.thread = threading.local()

    def end(self) -> None:
        self.ended = True
        self.patch.restore()
        self.used.clear()

    def progress(self) -> str:
        return f"{min(self.calls)} of {len(self.batches)} forwards are done"

    def metrics(self) -> RouteMetrics:
        return self.counter.metrics(
            sum(batch.num_captured for batch in self.batches), sum(batch.num_uncaptured for batch in self.batches)
        )

    def checkpointed(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """`checkpoint(fn, ...)` whose `fn` remembers which forward it belongs to when it runs again."""

        def checkpoint_segment(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return checkpoint(Segment(self, fn), *args, **kwargs)

        return checkpoint_segment

    def handle(self, column: int) -> Callable[[torch.Tensor, torch.Tensor, Callable[[], Any]], Any]:
        def replay(scores: torch.Tensor, source: torch.Tensor, topk: Callable[[], Any]) -> Any:
            index, again = self._which_forward(column)
            experts = self._experts(column, index, again, scores, topk)
            return torch.return_types.topk((source.gather(-1, experts), experts))

        return replay

    def next_forward(self, column: int) -> int:
        index = self.calls[column]
        if index == len(self.batches):
            raise RouterReplayError(
                f"{self.routers[column].name} is called for forward {index + 1}, but routes of {index} are open. Give "
                "`open` one batch of routes for each forward."
            )
        self.calls[column] += 1
        return index

    def _which_forward(self, column: int) -> tuple[int, bool]:
        """Index of the batch this router call belongs to, and whether it repeats an earlier call."""
        segment: Segment | None = getattr(self.thread, "segment", None)
        if segment is not None:
            return segment.which_forward(column)
        if not in_backward():
            return self.next_forward(column), False
        if len(self.batches) > 1:
            raise RouterReplayError(
                f"{self.routers[column].name} runs again during backward, inside a checkpoint that RouterReplay does "
                f"not know, and {len(self.batches)} forwards are open. Open one scope for each forward and backward."
            )
        return 0, True

    def _experts(
        self, column: int, index: int, again: bool, scores: torch.Tensor, topk: Callable[[], Any]
    ) -> torch.Tensor:
        """`[..., k]` int64, the experts this call uses."""
        batch, router = self.batches[index], self.routers[column]
        num_rows = scores.numel() // scores.shape[-1]
        if num_rows != batch.captured.numel():
            batch_size, width = batch.captured.shape
            raise RouterReplayError(
                f"{router.name} routes {num_rows} tokens in forward {index}, whose routes are for {batch_size} x "
                f"{width} = {batch.captured.numel()} positions."
            )
        shape = (*scores.shape[:-1], router.top_k)
        if again and (column, index) in self.used:
            return self.used[column, index].to(torch.int64).view(shape)
        experts = batch.experts[:, :, column].to(scores.device, torch.int64).contiguous().view(num_rows, -1)
        if again and not batch.num_uncaptured:
            return experts.view(shape)
        with torch.no_grad():
            live = topk()[1].reshape(num_rows, -1)
            captured = batch.captured.reshape(num_rows).to(scores.device)
            if batch.num_uncaptured:
                fixed = captured | batch.padding.reshape(num_rows).to(scores.device)
                experts = torch.where(fixed[:, None], experts, live)
                self.used[column, index] = experts.to(batch.experts.dtype)
            if not again:
                self.counter.add(column, live, experts, captured)
        return experts.view(shape)


class Segment:
    """A function under a checkpoint: its first call is a forward, later ones repeat it."""

    def __init__(self, scope: OpenRoutes, fn: Callable[..., Any]):
        self.scope, self.fn = scope, fn
        self.started = False
        self.again = False
        self.forwards: dict[int, int] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.again, self.started = self.started, True
        if self.again and self.scope.ended:
            raise RouterReplayError(
                "A checkpointed layer runs again after its routes were closed: it would take the live router's experts "
                "and give wrong gradients. Close the scope after backward."
            )
        thread = self.scope.thread
        outer = getattr(thread, "segment", None)
        thread.segment = self
        try:
            return self.fn(*args, **kwargs)
        finally:
            thread.segment = outer

    def which_forward(self, column: int) -> tuple[int, bool]:
        if not self.again:
            self.forwards[column] = self.scope.next_forward(column)
        return self.forwards[column], self.again
