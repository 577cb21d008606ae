"""State while a pipeline schedule runs: the micro-batch that a router call belongs to, and its experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ..routing.errors import RouterReplayError
from ..routing.intercept import in_backward
from ..routing.metrics import RouteCounter, RouteMetrics
from .local_routes import LocalRoutes, Routes, as_route_batch, local_routes
from .routers import LocalRouter, ModelChunk, moe_layers, unwrap

Key = tuple[int, int]
"""Index of a model chunk, and of a micro-batch among those the chunk has seen."""


@dataclass
class _InFlight:
    """A micro-batch between the start of its forward and the end of its backward, in one chunk.

    Attributes:
        routes: of this rank's tokens.
        calls, repeats: how often each router ran in the forward, and again in the backward.
        used: by router, the experts of the forward where the live router chose some.
    """

    routes: LocalRoutes
    calls: list[int]
    repeats: list[int]
    used: dict[int, torch.Tensor] = field(default_factory=dict)


class ReplayedForwardStep:
    """A `forward_step_func` for one call of Megatron's forward-backward function, with routes for each micro-batch.

    A router call during the wrapped step is a forward, and takes the routes of the micro-batch that is next for that
    chunk. A router call during backward repeats a checkpointed forward. A hook on the step's output says whose backward
    runs: the schedule may hold any number of micro-batches between forward and backward, and recompute all layers, some
    layers or some micro-batches.

    Attributes:
        metrics: how far the live routers of this rank agreed on this rank's tokens; set when the schedule has ended
            without an exception.
    """

    metrics: RouteMetrics

    def __init__(
        self,
        chunks: Sequence[ModelChunk],
        forward_step: Callable[..., tuple[Any, Any]],
        routes_of: Callable[[int], Routes],
        lengths_of: Callable[[int], Sequence[int]] | None,
        forward_only: bool,
    ) -> None:
        self._chunks, self._forward_step, self._forward_only = chunks, forward_step, forward_only
        self._routes_of, self._lengths_of = routes_of, lengths_of
        self._config = chunks[0].config
        self._layers = moe_layers(self._config)
        self._num_seen = [0] * len(chunks)
        self._in_flight: dict[Key, _InFlight] = {}
        self._forward: Key | None = None
        self._backward: Key | None = None
        self._ended = False
        self._without_backward: list[Key] = []
        local_layers = [router.layer for chunk in chunks for router in chunk.routers]
        self._counter = RouteCounter(tuple(local_layers), self._config.moe_router_topk)
        self._num_captured = self._num_live = 0

    def __call__(self, data_iterator: Any, model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        chunk = self._index_of(model)
        key = (chunk, self._num_seen[chunk])
        self._num_seen[chunk] += 1
        self._in_flight[key] = self._load(key)
        self._forward = key
        try:
            result = self._forward_step(data_iterator, model, *args, **kwargs)
        finally:
            self._forward = None
        self._check_calls(key)
        differentiable = (
            [] if self._forward_only else [tensor for tensor in _tensors(result[0]) if tensor.requires_grad]
        )
        for tensor in differentiable:
            tensor.register_hook(partial(self._begin_backward, key))
        if not differentiable:
            del self._in_flight[key]
        return result

    def end(self) -> None:
        """No route is used from here on, whatever happened."""
        self._ended = True
        # Nothing comes after the last backward that would let go of its micro-batch.
        self._without_backward = sorted(key for key in self._in_flight if key != self._backward)
        self._in_flight.clear()

    def finish(self) -> None:
        """Check, after `end`, that the schedule was whole, and set the metrics.

        Whole is one in which every chunk ran the same number of micro-batches, at least one, and backward reached the
        output of each that is to be differentiated.
        """
        if len(set(self._num_seen)) > 1:
            raise RouterReplayError(
                f"The model chunks ran {self._num_seen} micro-batches: the schedule was left in the middle."
            )
        if not any(self._num_seen):
            raise RouterReplayError(
                "No micro-batch ran while the routes were open. Give the wrapped forward step to the forward-backward "
                "function, and call that inside the block."
            )
        if self._without_backward:
            chunk, index = self._without_backward[0]
            raise RouterReplayError(
                f"{len(self._without_backward)} micro-batches had no backward while their routes were open (first: "
                f"micro-batch {index} of model chunk {chunk}). Leave the block after the forward-backward function has "
                "returned, or open it with forward_only=True where nothing is differentiated."
            )
        self.metrics = self._counter.metrics(self._num_captured, self._num_live)

    def padding_mask(self, chunk: int) -> torch.Tensor:
        """Bool `[s, B]` for a router of `chunk` that is about to run."""
        _, batch, _ = self._current(chunk)
        return batch.routes.padding_mask

    def experts(
        self, slot: RouteSlot, scores: torch.Tensor, top_k: int, live_topk: Callable[[], tuple]
    ) -> torch.Tensor:
        """Int64 `[N, k]`, the experts that this router call uses.

        Args:
            slot: the router's.
            scores: `[N, E]`, what the router ranks.
            top_k: `k`.
            live_topk: the router's own choice.
        """
        (_, index), batch, again = self._current(slot.chunk)
        routes, router = batch.routes, slot.router
        if len(scores) != routes.num_tokens:
            raise RouterReplayError(
                f"{router.name} (layer {router.layer}) routes {len(scores)} tokens of micro-batch {index}, whose "
                f"routes are for {routes.num_tokens} on this rank. Routes and tokens have to be padded alike, and the "
                "parallel groups have to be those that the model was built with."
            )
        (batch.repeats if again else batch.calls)[slot.column] += 1
        if again and batch.repeats[slot.column] > 1:
            raise RouterReplayError(
                f"{router.name} ran again more than once in the backward of micro-batch {index}: another micro-batch's "
                "backward runs without having passed through the output of its forward step."
            )
        if again and slot.column in batch.used:
            return batch.used[slot.column].to(torch.int64)
        experts = routes.experts[:, slot.column].to(torch.int64)
        if again:
            return experts
        with torch.no_grad():
            live = live_topk()[1]
            if routes.num_live:
                experts = torch.where(routes.chosen[:, None], experts, live)
                batch.used[slot.column] = experts.to(routes.experts.dtype)
            self._counter.add(slot.place, live, experts, routes.captured)
        return experts

    def _current(self, chunk: int) -> tuple[Key, _InFlight, bool]:
        """The micro-batch that a router of this chunk runs for now, and whether it runs again."""
        again = in_backward()
        key = self._backward if again else self._forward
        batch = None if key is None else self._in_flight.get(key)
        if key is None or batch is None or key[0] != chunk:
            doing = "backward" if again else "forward"
            raise RouterReplayError(
                f"A router of model chunk {chunk} runs in a {doing} that no micro-batch of the schedule is known for. "
                "Pass the wrapped forward step to the forward-backward function, and run the model nowhere else while "
                "routes are open."
            )
        return key, batch, again

    def _begin_backward(self, key: Key, grad: torch.Tensor) -> None:
        if self._ended:
            raise RouterReplayError(
                f"Backward of micro-batch {key[1]} runs after its routes were closed; layers that run again would take "
                "the live router's experts and give wrong gradients. Keep the schedule open until backward is done."
            )
        if self._backward is not None and self._backward != key:
            self._in_flight.pop(self._backward, None)
        self._backward = key

    def _load(self, key: Key) -> _InFlight:
        chunk, index = key
        routers = self._chunks[chunk].routers
        where = f"micro-batch {index}"
        batch = as_route_batch(self._routes_of(index), self._layers, self._config.num_layers, where)
        top_k, num_experts = self._config.moe_router_topk, self._config.num_moe_experts
        if batch.experts.shape[3] != top_k:
            raise RouterReplayError(
                f"{where}: routes of {batch.experts.shape[3]} experts a token, moe_router_topk is {top_k}."
            )
        if batch.num_experts > num_experts:
            raise RouterReplayError(
                f"{where}: routes to {batch.num_experts} experts (ids 0 to {batch.num_experts - 1}), num_moe_experts "
                f"is {num_experts}."
            )
        routes = local_routes(
            batch,
            [self._layers.index(router.layer) for router in routers],
            self._chunks[chunk].shard,
            num_experts=num_experts,
            lengths=None if self._lengths_of is None else self._lengths_of(index),
            device=routers[0].module.weight.device if routers else "cpu",
        )
        if chunk == next((i for i, c in enumerate(self._chunks) if c.routers), None):
            self._num_captured += routes.num_captured
            self._num_live += routes.num_live
        return _InFlight(routes, calls=[0] * len(routers), repeats=[0] * len(routers))

    def _check_calls(self, key: Key) -> None:
        chunk, index = key
        for router, calls in zip(self._chunks[chunk].routers, self._in_flight[key].calls, strict=True):
            if calls != 1:
                raise RouterReplayError(
                    f"{router.name} (layer {router.layer}) took its routes {calls} times in the forward of micro-batch "
                    f"{index}, expected once."
                )

    def _index_of(self, model: nn.Module) -> int:
        inner = unwrap(model)
        for i, chunk in enumerate(self._chunks):
            if chunk.model is inner:
                return i
        raise RouterReplayError(
            f"The schedule runs a {type(inner).__name__} that is not among the {len(self._chunks)} model chunks that "
            "MegatronRouterReplay was made for."
        )


class RouteSlot:
    """Stands in a router's `router_replay`, and answers its top-k.

    Args:
        schedule: what is open.
        chunk: index of the router's model chunk.
        column: the router's place in its chunk.
        place: the router's place among all of this rank.
        router: the router.
    """

    def __init__(self, schedule: ReplayedForwardStep, chunk: int, column: int, place: int, router: LocalRouter) -> None:
        self.schedule, self.chunk, self.column, self.place, self.router = schedule, chunk, column, place, router

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and ids of the experts to use, each `[N, k]`; what megatron-core calls instead of its top-k.

        The scores are gathered from the live router's, so that its gradient stays, also for experts of groups that
        group-limited routing would have masked.
        """
        assert default_compute_topk is not None
        live = partial(default_compute_topk, scores, topk, num_groups=num_groups, group_topk=group_topk)
        experts = self.schedule.experts(self, scores, topk, live)
        return scores.gather(1, experts), experts


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
