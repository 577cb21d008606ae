"""Log-normaliser and mean logit of a set of logits per row, over one or several vocabulary shards.

A row's set of logits `z` is described, relative to its maximum `m`, by

    sum_exp  = sum_v e^(z_v - m)
    sum_zexp = sum_v e^(z_v - m) (z_v - m)

from which log-normaliser, entropy and log-probs follow, and which shards can add after agreeing on `m`. `m` carries no
gradient: a shift of all logits changes none of the results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

LEAST = -1e30
"""Stands for a logit of minus infinity, relative to its row's maximum: its exponential is 0, and so is 0 times it."""


@dataclass
class RowStatistics:
    """Statistics of `R` rows, each `[R]`; see the module's description.

    Attributes:
        max: largest logit; minus infinity for a row of which nothing lies in this shard.
        sum_exp, sum_zexp: relative to `max`.
        target: logit of the sampled token, 0 where another shard owns it.
    """

    max: torch.Tensor
    sum_exp: torch.Tensor
    sum_zexp: torch.Tensor
    target: torch.Tensor

    def relative_to(self, maximum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`sum_exp` and `sum_zexp` relative to another, larger maximum."""
        # An empty shard has sums of 0 and no maximum; -inf would make them NaN.
        shift = torch.where(self.max == -math.inf, 0.0, self.max - maximum)
        scale = shift.exp()
        return self.sum_exp * scale, (self.sum_zexp + shift * self.sum_exp) * scale


class SegmentStatistics(torch.autograd.Function):
    """`(max, sum_exp, sum_zexp, drawn)` of runs of a flat vector of logits.

    Each sum goes over its run in order, without atomics. `drawn` is one logit of each run: that of the sampled token.

    Args of `apply`:
        logits: `[P]`.
        rows: `[P]` int64, the run of each logit.
        offsets: `[R + 1]` int64, the same runs.
        pairs: `[R]` int64, the place of each run's `drawn`, which is 0 where `P` is 0; `None` for no `drawn`.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor, pairs: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        # A sum that nothing needs gets no gradient, and costs nothing in backward.
        ctx.set_materialize_grads(False)
        maximum = torch.segment_reduce(logits, "max", offsets=offsets, initial=-math.inf)
        # index_select takes a fifth of the time of an index in brackets.
        shifted = (logits - maximum.index_select(0, rows)).clamp_(min=LEAST)
        exp = shifted.exp()
        ctx.save_for_backward(shifted, rows, pairs)
        ctx.mark_non_differentiable(maximum)
        drawn = None
        if pairs is not None:
            drawn = logits[pairs] if len(logits) else torch.zeros_like(maximum)
        return maximum, segment_sum(exp, offsets), segment_sum(exp * shifted, offsets), drawn

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, grad_sum: Any, grad_zsum: Any, grad_drawn: Any) -> tuple[torch.Tensor | None, ...]:
        shifted, rows, pairs = ctx.saved_tensors
        total = torch.zeros_like(shifted)
        if grad_sum is not None:
            total = grad_sum.index_select(0, rows)
        if grad_zsum is not None:
            total = total + grad_zsum.index_select(0, rows) * (1 + shifted)
        total *= shifted.exp()
        if grad_drawn is not None and len(shifted):
            # Runs whose token is not theirs share a place, and add 0 to it.
            total.index_add_(0, pairs, grad_drawn)
        return total, None, None, None


def segment_sum(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Sums of `values[offsets[i]:offsets[i + 1]]`, without gradient."""
    return torch.segment_reduce(values, "sum", offsets=offsets, initial=0)
