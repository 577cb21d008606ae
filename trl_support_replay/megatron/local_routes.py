"""Cuts the routes of one rank's tokens and routers out of those of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from ..routing.batch import RouteBatch
from ..routing.errors import RouterReplayError
from .sequence_shard import SequenceShard

Routes: TypeAlias = RouteBatch | torch.Tensor | np.ndarray
"""Routes of a whole micro-batch, `[B, S]` positions as they stand before any split over ranks. Plain integers
`[B, S, L, k]` have every position captured."""


@dataclass(frozen=True)
class LocalRoutes:
    """Routes of the `N` tokens of one rank, in the order of its hidden states (`[s, b]`, flattened).

    Attributes:
        experts: `[N, l, k]` in the recorded type, for the `l` routers of one model chunk.
        captured: bool `[N]`, positions whose experts are replayed.
        chosen: bool `[N]`, positions that take `experts`: captured ones and padding. The rest takes the live router's.
        num_captured, num_live: number of captured positions, and of those left to the live router.
        batch_size: `B`.
    """

    experts: torch.Tensor
    captured: torch.Tensor
    chosen: torch.Tensor
    num_captured: int
    num_live: int
    batch_size: int

    @property
    def num_tokens(self) -> int:
        return len(self.captured)

    @property
    def padding_mask(self) -> torch.Tensor:
        """Bool `[s, B]`, what a router takes as `padding_mask`: True keeps a position out of the balance counts.

        There is one even when it is True nowhere: a rank without a mask counts its own positions times the number of
        ranks, whatever the masks of the others.
        """
        return ~self.captured.view(-1, self.batch_size)


def as_route_batch(routes: Routes, layers: tuple[int, ...], num_layers: int, where: str) -> RouteBatch:
    """Routes with one column for each mixture-of-experts layer of the model.

    Args:
        routes: with a column for each of `layers`, or, if they are plain integers, for every layer: engines report
            dense layers as zeros.
        layers: global numbers of the layers with experts.
        num_layers: of the whole model.
        where: what to call the routes in errors.

    Raises:
        RouterReplayError: another number of columns, or columns of other layers.
        RoutesError: ids that no router could have chosen.
    """
    if not isinstance(routes, RouteBatch):
        experts = torch.from_numpy(routes) if isinstance(routes, np.ndarray) else routes
        if experts.dim() == 4 and experts.shape[2] == num_layers != len(layers):
            experts = experts[:, :, list(layers)]
        routes = RouteBatch(experts)
    if routes.layers is not None and routes.layers != layers:
        raise RouterReplayError(f"{where}: routes of layers {routes.layers}, the model has experts in {layers}.")
    if routes.experts.shape[2] != len(layers):
        raise RouterReplayError(
            f"{where}: routes of {routes.experts.shape[2]} layers, the model has experts in {len(layers)} of its "
            f"{num_layers} layers: {layers}."
        )
    return routes


def local_routes(
    batch: RouteBatch,
    columns: Sequence[int],
    shard: SequenceShard,
    *,
    num_experts: int,
    lengths: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> LocalRoutes:
    """This rank's part of a micro-batch's routes.

    Padding gets experts by turns, each token `k` different ones: constant experts would send every padded position to
    the same expert-parallel rank.

    Args:
        batch: `[B, S]` positions.
        columns: of the `l` routers.
        shard: what the rank holds.
        num_experts: `E`.
        lengths: of the sequences packed on the sequence axis; `None` for one sequence a row.
        device: where the routers are.

    Raises:
        ValueError: a sequence that cannot be cut, or `lengths` that do not add up to `S`.
    """
    batch_size, width = batch.captured.shape
    if lengths is not None and sum(lengths) != width:
        raise ValueError(f"Packed sequences of {sum(lengths)} positions in all, routes of {width}.")
    positions = shard.positions([width] if lengths is None else lengths).to(batch.captured.device)
    captured = batch.captured[:, positions].T.reshape(-1)
    padding = batch.padding[:, positions].T.reshape(-1)
    experts = batch.experts[:, positions][:, :, list(columns)].transpose(0, 1).flatten(0, 1)  # [N, l, k]
    num_captured, num_padding = int(captured.sum()), int(padding.sum())
    if num_padding:
        num_tokens, _, top_k = experts.shape
        by_turns = torch.arange(num_tokens * top_k, device=experts.device).view(num_tokens, 1, top_k) % num_experts
        experts = torch.where(padding[:, None, None], by_turns.to(experts.dtype), experts)
    return LocalRoutes(
        experts=experts.to(device, non_blocking=True),
        captured=captured.to(device, non_blocking=True),
        chosen=(captured | padding).to(device, non_blocking=True),
        num_captured=num_captured,
        num_live=len(captured) - num_captured - num_padding,
        batch_size=batch_size,
    )
