"""Replaces the result of a router's top-k while its forward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .discovery import Router, is_topk, topk_arguments
from .errors import RouterReplayError

_MASKED_FILL = frozenset({torch.masked_fill, torch.Tensor.masked_fill})

# handle(scores, source, topk): `scores` is what the router ranks, `source` where the weights come from, `topk()` the
# router's own call. Returns `(values, indices)`.
Handle = Callable[[torch.Tensor, torch.Tensor, Callable[[], Any]], Any]


class InterceptTopK(TorchFunctionMode):
    """While active, `handle` answers the router's top-k.

    The rest of the router (bias, groups, normalisation, scaling) runs as it is written. The mode is local to the
    thread, so that it works on the threads of the autograd engine, where checkpointed layers run again.

    `source` is `scores` from before the router masked whole groups of experts: a recorded expert may lie in a group
    that the live router masks, and a masked score has neither its value nor a gradient.
    """

    def __init__(self, router: Router, handle: Handle):
        super().__init__()
        self.router = router
        self.handle = handle
        self.num_calls = 0
        self.masked: tuple[torch.Tensor, torch.Tensor] | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_topk(func):
            scores, k, dim = topk_arguments(args, kwargs)
            if dim == scores.dim() - 1 and scores.shape[-1] == self.router.num_experts:
                self.num_calls += 1
                if self.num_calls == self.router.num_calls:
                    return self._answer(scores, k, lambda: func(*args, **kwargs))
        out = func(*args, **kwargs)
        if func in _MASKED_FILL and out.dim() and out.shape[-1] == self.router.num_experts:
            self.masked = (out, args[0])
        return out

    def _answer(self, scores: torch.Tensor, k: int, topk: Callable[[], Any]) -> Any:
        if k != self.router.top_k:
            raise RouterReplayError(f"{self.router.name} chooses {k} experts, but chose {self.router.top_k} before.")
        source = self.masked[1] if self.masked is not None and scores is self.masked[0] else scores
        return self.handle(scores, source, topk)

    def check(self) -> None:
        """Raise unless the forward made exactly the top-k calls that the probe saw."""
        if self.num_calls != self.router.num_calls:
            raise RouterReplayError(
                f"{self.router.name} called top-k over {self.router.num_experts} experts {self.num_calls} times, "
                f"expected {self.router.num_calls}: its routing was not seen exactly once."
            )


def intercept(router: Router, forward: Callable[..., Any], handle: Handle) -> Callable[..., Any]:
    """`forward` of a router's module with its top-k answered by `handle`."""

    def forward_with_routes(*args: Any, **kwargs: Any) -> Any:
        mode = InterceptTopK(router, handle)
        with mode:
            out = forward(*args, **kwargs)
        mode.check()
        return out

    # A compiled model leaves its graph here: the routes change with every batch, and so would the graph.
    outside = torch.compiler.disable(forward_with_routes, reason="routed experts are replayed outside of the graph")
    outside._intercepts_routes = True
    return outside


def check_untouched(named_modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise if the forward of one of these modules is already intercepted."""
    for name, module in named_modules:
        if getattr(vars(module).get("forward"), "_intercepts_routes", False):
            raise RouterReplayError(
                f"{name} already replays or records routes for another RouterReplay of this model. Close that first."
            )


class Patch:
    """Instance attributes that are replaced for a while, and restored."""

    def __init__(self) -> None:
        self._saved: list[tuple[nn.Module, str, bool, Any]] = []

    def set(self, module: nn.Module, name: str, value: Any) -> None:
        """Set `module.name`, remembering whether the instance had it and what it was."""
        own = name in vars(module)
        self._saved.append((module, name, own, vars(module).get(name)))
        vars(module)[name] = value

    def restore(self) -> None:
        """Put everything back, last change first. May be called twice."""
        while self._saved:
            module, name, own, value = self._saved.pop()
            if own:
                vars(module)[name] = value
            else:
                del vars(module)[name]


def in_backward() -> bool:
    """Whether this thread is inside the autograd engine."""
    return torch._C._current_graph_task_id() != -1
