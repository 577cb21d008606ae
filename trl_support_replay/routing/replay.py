"""`RouterReplay`: run a Hugging Face mixture-of-experts model through recorded experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .batch import RouteBatch
from .discovery import find_routers
from .errors import RouterReplayError
from .intercept import Patch, check_untouched, intercept
from .metrics import RouteMetrics
from .recording import Recording
from .scope import OpenRoutes

# Where modules keep the function that checkpoints them: transformers' layers, and torch's `checkpoint_wrapper`.
_CHECKPOINT_FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")


class RouterReplay:
    """Replays recorded experts in one model instance, and records them.

    Nothing is installed while no scope is open; a scope patches the instances of this model's routers and nothing
    else, so that a second model of the same class is not touched.

    - Gradient checkpointing, re-entrant or not: layers that run again during backward find the routes of their own
      forward, on whatever thread. The scope has to stay open until backward is done.
    - DDP, FSDP2, ZeRO-3: routers run inside their modules' forwards, with the hooks of the sharding around them.
      Building a `RouterReplay` runs the model once, so every rank has to build it.
    - `torch.compile`: the routers run outside of the graph. With `fullgraph=True` the first forward is refused.
    - The load-balancing loss of `output_router_logits` keeps the live router's probabilities.

    Args:
        model: the model, wrapped (DDP, PEFT, ...) or not.
        probe: runs the model once on a few tokens, to find its routers. Default: `model(input_ids=...)`.

    Attributes:
        routers: what was found, by layer.
        layers: global layer number of each router, `L`.
        num_experts: `E`.
        top_k: `k`.

    Raises:
        UnreplayableRouterError: no mixture of experts, or one whose routing cannot be replayed exactly.
    """

    def __init__(self, model: nn.Module, probe: Callable[[], Any] | None = None):
        check_untouched(model.named_modules())
        self.routers = find_routers(model, probe)
        self.layers = tuple(router.layer for router in self.routers)
        self.num_experts = self.routers[0].num_experts
        self.top_k = self.routers[0].top_k
        self._model = model
        self._scope: OpenRoutes | None = None

    @property
    def is_open(self) -> bool:
        """Whether routes are being replayed."""
        return self._scope is not None

    def open(self, *batches: RouteBatch) -> None:
        """Replay `batches` in the model's next forwards, one each, in this order, and in their backwards.

        Raises:
            RouterReplayError: a scope is still open on this model, or the batches do not fit it.
        """
        if self._scope is not None:
            raise RouterReplayError(
                f"The routes of an earlier scope are still open: {self._scope.progress()}. Close it after its "
                "backward, or discard it."
            )
        for i, batch in enumerate(batches):
            self._check_fits(batch, f"batch {i} of {len(batches)}")
        device = next(self._model.parameters()).device
        check_untouched((router.name, router.module) for router in self.routers)
        patch = Patch()
        self._scope = scope = OpenRoutes(self.routers, self.layers, [batch.to(device) for batch in batches], patch)
        try:
            for column, router in enumerate(self.routers):
                patch.set(router.module, "forward", intercept(router, router.module.forward, scope.handle(column)))
            for module in self._model.modules():
                for name in _CHECKPOINT_FUNCTIONS:
                    if callable(checkpoint := vars(module).get(name)):
                        patch.set(module, name, scope.checkpointed(checkpoint))
        except BaseException:
            self.discard()
            raise

    def close(self) -> RouteMetrics:
        """Leave the model as it was, after the last backward.

        Returns:
            How far the live router agreed.

        Raises:
            RouterReplayError: no scope is open, or not every batch went through every router.
        """
        scope = self._scope
        if scope is None:
            raise RouterReplayError("No routes are open.")
        self.discard()
        unfinished = [r.name for r, done in zip(self.routers, scope.calls, strict=True) if done != len(scope.batches)]
        if unfinished:
            raise RouterReplayError(
                f"{scope.progress()}, and the scope is closed: the routes of the rest were never used "
                f"(routers: {', '.join(unfinished[:3])}{', ...' if len(unfinished) > 3 else ''})."
            )
        return scope.metrics()

    def discard(self) -> None:
        """Leave the model as it was, whatever happened. Does nothing when no scope is open."""
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.end()

    @contextmanager
    def scope(self, *batches: RouteBatch) -> Iterator[ReplayScope]:
        """`open` and `close` around a block, which has to hold the forwards and their backwards.

        Yields:
            An object whose `metrics` are there after the block.
        """
        result = ReplayScope()
        self.open(*batches)
        try:
            yield result
        except BaseException:
            self.discard()
            raise
        result.metrics = self.close()

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Note the live router's choices in every forward of the block, in order; nothing else changes.

        For the capture of `generate`, and to make routes to replay. Layers that run again during backward are not
        noted a second time.

        Raises:
            RouterReplayError: routes are being replayed or recorded already; in a forward, a router whose top-k is not
                the one that it was found with.
        """
        if self._scope is not None:
            raise RouterReplayError(
                f"Routes are being replayed ({self._scope.progress()}), so there is no live choice."
            )
        check_untouched((router.name, router.module) for router in self.routers)
        patch = Patch()
        recording = Recording(self.layers, self.num_experts)
        try:
            for column, router in enumerate(self.routers):
                patch.set(router.module, "forward", intercept(router, router.module.forward, recording.handle(column)))
            yield recording
        finally:
            patch.restore()

    def _check_fits(self, batch: RouteBatch, where: str) -> None:
        num_layers, top_k = batch.experts.shape[2:]
        if batch.layers is not None and batch.layers != self.layers:
            raise RouterReplayError(f"{where}: routes of layers {batch.layers}, the routers' are {self.layers}.")
        if num_layers != len(self.layers):
            raise RouterReplayError(
                f"{where}: routes of {num_layers} layers, the model has {len(self.layers)} routers."
            )
        if top_k != self.top_k:
            raise RouterReplayError(f"{where}: routes of {top_k} experts a token, the model's top_k is {self.top_k}.")
        if batch.num_experts > self.num_experts:
            raise RouterReplayError(
                f"{where}: routes to {batch.num_experts} experts (ids 0 to {batch.num_experts - 1}), the model has "
                f"{self.num_experts}."
            )


class ReplayScope:
    """What `RouterReplay.scope` yields.

    Attributes:
        metrics: set when the block has ended without an exception.
    """

    metrics: RouteMetrics
