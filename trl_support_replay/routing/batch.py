"""`RouteBatch`: the routes of one forward's tokens, as `[batch, sequence]` tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..traces.routes import RoutedExperts, RoutesError


class RouteBatch:
    """Routes for one call of a model's forward, position by position.

    Each position is one of three kinds. *Captured*: the recorded experts are used. *Uncaptured*: the live router
    chooses, and the position is counted. *Padding*: the experts `0 … k - 1` are used, `k` different ones, and the
    position enters no count.

    The ids keep their narrow type; a router's call widens its own layer only.

    Args:
        experts: `[B, S, L, k]` integer expert ids. Ids at uncaptured and padding positions mean nothing.
        captured: bool `[B, S]`. Default: every position that is not padding.
        padding: bool `[B, S]`. Default: none.

    Attributes:
        experts, captured, padding: as given, with `0 … k - 1` at padding.
        layers: global layer number of each of the `L` columns, or `None` when only their order is known.
        num_experts: all captured ids are below it.
        num_captured, num_uncaptured: number of positions of these kinds.

    Raises:
        RoutesError: shapes that disagree, negative ids, or one expert twice in a captured position.
    """

    experts: torch.Tensor
    captured: torch.Tensor
    padding: torch.Tensor
    layers: tuple[int, ...] | None
    num_experts: int
    num_captured: int
    num_uncaptured: int

    def __init__(
        self, experts: torch.Tensor, captured: torch.Tensor | None = None, padding: torch.Tensor | None = None
    ) -> None:
        if experts.dim() != 4 or experts.is_floating_point() or experts.dtype == torch.bool:
            raise RoutesError(
                f"Routes of shape {tuple(experts.shape)} and type {experts.dtype} are not integers [batch, sequence, "
                "layers, top_k]."
            )
        shape = experts.shape[:2]
        if padding is None:
            padding = torch.zeros(shape, dtype=torch.bool, device=experts.device)
        if captured is None:
            captured = ~padding
        for name, mask in (("captured", captured), ("padding", padding)):
            if mask.dtype != torch.bool or mask.shape != shape:
                raise RoutesError(f"The {name} mask is {mask.dtype} {tuple(mask.shape)}, not bool {tuple(shape)}.")
        if both := int((captured & padding).sum()):
            raise RoutesError(f"{both} positions are both captured and padding.")
        self._set(experts, captured, padding, None, _check_ids(experts, captured))

    def _set(
        self,
        experts: torch.Tensor,
        captured: torch.Tensor,
        padding: torch.Tensor,
        layers: tuple[int, ...] | None,
        num_experts: int,
    ) -> None:
        distinct = torch.arange(experts.shape[3], device=experts.device).to(experts.dtype)
        self.experts = torch.where(padding[:, :, None, None], distinct, experts)
        self.captured = captured
        self.padding = padding
        self.layers = layers
        self.num_experts = num_experts
        self.num_captured = int(captured.sum())
        self.num_uncaptured = captured.numel() - self.num_captured - int(padding.sum())

    @classmethod
    def _checked(cls, *fields: Any) -> RouteBatch:
        """A batch with these fields, in the order of `_set`, whose ids were checked before."""
        batch = object.__new__(cls)
        batch._set(*fields)
        return batch

    @classmethod
    def from_samples(
        cls,
        samples: Sequence[RoutedExperts],
        starts: Sequence[int],
        width: int,
        rows: Sequence[int] | None = None,
    ) -> RouteBatch:
        """A padded batch: the tokens of sample `i` stand at positions `starts[i] …`; everything else is padding.

        Args:
            samples: routes of each sample's tokens, prompt and completion.
            starts: position of each sample's first token in its row.
            width: `S`.
            rows: row of each sample, from 0, where samples are packed; `None` gives each sample its own row.

        Raises:
            RoutesError: samples of different models, or one that does not fit, naming it and the numbers.
        """
        if len(samples) != len(starts) or not samples:
            raise RoutesError(f"{len(samples)} samples with routes for {len(starts)} starting positions.")
        first = samples[0]
        rows = range(len(samples)) if rows is None else rows
        shape = (max(rows) + 1, width)
        experts = np.zeros((*shape, *first.experts.shape[1:]), dtype=first.experts.dtype)
        captured = np.zeros(shape, dtype=bool)
        padding = np.ones(shape, dtype=bool)
        for i, (routes, row, start) in enumerate(zip(samples, rows, starts, strict=True)):
            routes.check(layers=first.layers, top_k=first.top_k, num_experts=first.num_experts, where=f"sample {i}")
            stop = start + len(routes)
            if start < 0 or stop > width:
                raise RoutesError(f"sample {i}: {len(routes)} tokens from position {start} do not fit a width {width}.")
            experts[row, start:stop] = routes.experts
            captured[row, start:stop] = routes.captured
            padding[row, start:stop] = False
        tensors = map(torch.from_numpy, (experts, captured, padding))
        return cls._checked(*tensors, first.layers, first.num_experts)

    def split(self, size: int) -> list[RouteBatch]:
        """Parts of at most `size` samples, for a forward that is run in several calls."""
        return [
            self._checked(*part, self.layers, self.num_experts)
            for part in zip(self.experts.split(size), self.captured.split(size), self.padding.split(size), strict=True)
        ]

    def to(self, device: torch.device | str) -> RouteBatch:
        """The same batch on another device."""
        new = object.__new__(RouteBatch)
        new.__dict__.update(self.__dict__)
        for name in ("experts", "captured", "padding"):
            setattr(new, name, getattr(self, name).to(device, non_blocking=True))
        return new


def _check_ids(experts: torch.Tensor, captured: torch.Tensor) -> int:
    """Refuse negative and repeated ids at captured positions; one more than the largest id."""
    # int32, since torch has no minimum of unsigned integers wider than a byte.
    rows = experts[captured].to(torch.int32)
    if not rows.numel():
        return 0
    if int(rows.min()) < 0:
        raise RoutesError(f"Expert id {int(rows.min())} at a captured position is negative.")
    ordered = rows.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    if bool(twice.any()):
        row, column = twice.nonzero()[0].tolist()
        sample, position = captured.nonzero()[row].tolist()
        raise RoutesError(
            f"sample {sample}, position {position}, layer column {column}: one expert twice in "
            f"{rows[row, column].tolist()}."
        )
    return int(ordered[..., -1].max()) + 1
