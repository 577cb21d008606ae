"""`Recording`: the experts that the routers of a model chose, forward by forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..traces.routes import RoutedExperts, route_dtype
from .devices import stack_across_devices
from .errors import RouterReplayError
from .intercept import in_backward


class Recording:
    """Choices of the live routers in consecutive forwards of one batch (`generate`: the prompt, then token by token).

    Args:
        layers: global layer number of each router.
        num_experts: `E`.
    """

    def __init__(self, layers: tuple[int, ...], num_experts: int):
        self.layers, self.num_experts = layers, num_experts
        self._calls: list[list[torch.Tensor]] = [[] for _ in layers]
        self._dtype = torch.from_numpy(np.empty(0, route_dtype(num_experts))).dtype

    def handle(self, column: int) -> Callable[[torch.Tensor, torch.Tensor, Callable[[], Any]], Any]:
        """What a router's top-k is answered with: its own result, noted."""

        def record(scores: torch.Tensor, source: torch.Tensor, topk: Callable[[], Any]) -> Any:
            result = topk()
            if not in_backward():
                experts = result[1].detach()
                self._calls[column].append(experts.reshape(-1, experts.shape[-1]).to(self._dtype))
            return result

        return record

    def experts(self, batch_size: int) -> torch.Tensor:
        """`[B, S, L, k]` expert ids; `S` positions went through the model, over all forwards.

        Args:
            batch_size: `B`, the same in every forward.
        """
        columns = []
        for layer, calls in zip(self.layers, self._calls, strict=True):
            wrong = [len(call) for call in calls if len(call) % batch_size]
            if not calls or wrong:
                raise RouterReplayError(
                    f"The router of layer {layer} recorded {len(calls)} forwards of {[len(c) for c in calls[:4]]} ... "
                    f"tokens, which are no batches of {batch_size}."
                )
            columns.append(torch.cat([call.view(batch_size, -1, call.shape[-1]) for call in calls], dim=1))
        return stack_across_devices(columns, dim=2)

    def samples(self, starts: Sequence[int], num_tokens: Sequence[int], width: int) -> list[RoutedExperts]:
        """Routes of each sample of a padded batch, as `generate` returns it.

        Args:
            starts: position of each sample's first token.
            num_tokens: number of tokens of each sample, prompt and completion.
            width: number of positions of the batch. The last one may not have entered the model; a token there is
                uncaptured then.

        Raises:
            RouterReplayError: the forwards did not see each position once, as when `generate` runs without a cache.
        """
        experts = self.experts(len(starts)).cpu().numpy()
        if experts.shape[1] not in (width - 1, width):
            raise RouterReplayError(
                f"{experts.shape[1]} positions went through the model for sequences of {width} positions. Each has to "
                "go through it once; generate with use_cache=True."
            )
        return [
            RoutedExperts.from_prefix(
                experts[i, start : start + n],
                n,
                num_experts=self.num_experts,
                layers=self.layers,
                where=f"sample {i}",
            )
            for i, (start, n) in enumerate(zip(starts, num_tokens, strict=True))
        ]
