"""`MegatronRouterReplay`: run a megatron-core mixture-of-experts model through recorded experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..routing.errors import RouterReplayError
from .core import RouterReplay, TopKRouter
from .local_routes import Routes
from .routers import LocalRouter, find_chunks
from .schedule import ReplayedForwardStep, RouteSlot


class MegatronRouterReplay:
    """Replays recorded experts in the model chunks of one rank, for one pipeline schedule at a time.

    Nothing is installed while no schedule is open. The model need not be built with `moe_enable_routing_replay`, and
    megatron-core's global list of replay objects is not used.

    - Pipelines, interleaved or not: routers take the columns of their own layers by global layer number; routes belong
      to a micro-batch until its backward is done, in whatever order the schedule runs.
    - Recomputation, full, block or selective, of all micro-batches or some: a router that runs again takes the experts
      of its own forward.
    - Tensor with sequence parallelism, context parallelism: routes are given for the whole micro-batch, and cut here.
    - Expert parallelism: nothing to do; every rank routes its own tokens.
    - Data parallelism: every rank gives the routes of its own micro-batches.
    - Load balancing: positions without recorded experts, padding among them, are in no count; the routers get their
      padding mask from the routes, not from the model. Expert biases count the replayed experts; auxiliary losses keep
      the live router's probabilities and choices, as in megatron-core's own replay.

    Args:
        model_chunks: the model, or the list of chunks, that goes to Megatron's forward-backward function; wrapped or
            not.

    Attributes:
        layers: global numbers, from 0, of the layers whose routers are on this rank.

    Raises:
        UnreplayableRouterError: a setting or a router that routes cannot be replayed with, by name.
    """

    def __init__(self, model_chunks: nn.Module | Sequence[nn.Module]) -> None:
        self._chunks = find_chunks([model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks))
        self.layers = tuple(router.layer for chunk in self._chunks for router in chunk.routers)

    @contextmanager
    def schedule(
        self,
        forward_step: Callable[..., tuple[Any, Any]],
        routes_of: Callable[[int], Routes],
        forward_only: bool = False,
        *,
        lengths_of: Callable[[int], Sequence[int]] | None = None,
    ) -> Iterator[ReplayedForwardStep]:
        """Routes for one call of `get_forward_backward_func()(...)`, which has to run inside the block.

        ```python
        with replay.schedule(forward_step, routes_of) as replayed_step:
            forward_backward(forward_step_func=replayed_step, model=model_chunks, ...)
        ```

        Args:
            forward_step: the loop's own, `(data_iterator, model) -> (output, loss_func)`.
            routes_of: the routes of micro-batch `i`, `0 ... num_microbatches - 1`: a `RouteBatch`, or integers
                `[B, S, L, k]`, for the whole micro-batch as it stands before any split over ranks, padding included.
                Called once for each chunk of this rank.
            forward_only: what the forward-backward function is given. Routes are then let go after each forward, and
                a router that runs again is an error.
            lengths_of: for sequences packed on one axis, the padded lengths of those in micro-batch `i`; how context
                parallelism cuts them.

        Yields:
            The `forward_step_func` to pass on. Its `metrics` are there after the block.

        Raises:
            RouterReplayError: replay state left by someone else, another schedule open on the same routers, routes
                that do not fit the model or the tokens, a router that did not take its routes exactly once, no
                micro-batch at all, or one without a backward though `forward_only` is False.
        """
        step = ReplayedForwardStep(self._chunks, forward_step, routes_of, lengths_of, forward_only)
        with ExitStack() as installed:
            installed.callback(step.end)
            for _, _, router in self._routers():
                _check_clean(router)
            for place, (chunk, column, router) in enumerate(self._routers()):
                _install(installed, RouteSlot(step, chunk, column, place, router))
            yield step
        step.finish()

    def _routers(self) -> Iterator[tuple[int, int, LocalRouter]]:
        for i, chunk in enumerate(self._chunks):
            for column, router in enumerate(chunk.routers):
                yield i, column, router


def _check_clean(router: LocalRouter) -> None:
    state = router.module.router_replay
    if isinstance(state, RouteSlot):
        raise RouterReplayError(
            f"{router.name} (layer {router.layer}) already replays routes for another schedule; close that one first."
        )
    if not isinstance(state, RouterReplay):
        return
    left = {
        "router_replay_action": state.router_replay_action,
        "target_topk_idx": state.target_topk_idx,
        "replay_backward_list": state.replay_backward_list or None,
    }
    found = [name for name, value in left.items() if value is not None]
    if found:
        raise RouterReplayError(
            f"{router.name} (layer {router.layer}): its megatron-core RouterReplay still holds {', '.join(found)} of "
            "an earlier pass. Call RouterReplay.clear_global_indices() and clear_global_router_replay_action() first."
        )


def _install(installed: ExitStack, slot: RouteSlot) -> None:
    """Put the slot into its router until `installed` is closed."""
    router = slot.router.module
    installed.callback(setattr, router, "router_replay", router.router_replay)
    router.router_replay = slot
    mask = partial(_with_padding_mask, slot)
    installed.callback(router.register_forward_pre_hook(mask, with_kwargs=True).remove)
    if router.enable_expert_bias:
        # Found on the class; an attribute of the instance hides it, and is deleted afterwards.
        installed.callback(delattr, router, "_apply_expert_bias")
        router._apply_expert_bias = partial(_count_unpadded, router._apply_expert_bias)


def _with_padding_mask(
    slot: RouteSlot, router: TopKRouter, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hand the router its own part of the padding mask, in place of one that was given to the model.

    A model passes its mask on, but cuts it for sequence parallelism in the first pipeline stage only.
    """
    kwargs = {name: value for name, value in kwargs.items() if name != "padding_mask"}
    return (args[0], slot.schedule.padding_mask(slot.chunk), *args[2:]), kwargs


def _count_unpadded(
    count: Callable[[torch.Tensor], None], routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
) -> None:
    """Count a router's tokens per expert, without padding.

    All versions known here combine the map `[N, E]` with the mask `[N]` as they are, which broadcasts the mask over the
    experts: an error, or, where N equals E or 1, wrong counts.

    Args:
        count: the router's own method.
        routing_map: bool `[N, E]`.
        padding_mask: bool `[N]`, True is padding.
    """
    count(routing_map if padding_mask is None else routing_map & ~padding_mask[:, None])
