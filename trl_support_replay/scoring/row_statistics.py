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
    """`(max, sum_exp, sum_zexp)` of runs of a flat vector of logits; sums over each run in order, without atomics.

    Args of `apply`:
        logits: `[P]`.
        rows: `[P]` int64, the run of each logit.
        offsets: `[R + 1]` int64, the same runs.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        maximum = torch.segment_reduce(logits, "max", offsets=offsets, initial=-math.inf)
        shifted = (logits - maximum[rows]).clamp_(min=LEAST)
        exp = shifted.exp()
        ctx.save_for_backward(shifted, rows)
        ctx.mark_non_differentiable(maximum)
        return maximum, segment_sum(exp, offsets), segment_sum(exp * shifted, offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, grad_sum: torch.Tensor, grad_zsum: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        shifted, rows = ctx.saved_tensors
        return shifted.exp() * (grad_sum[rows] + grad_zsum[rows] * (1 + shifted)), None, None


def segment_sum(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Sums of `values[offsets[i]:offsets[i + 1]]`, without gradient."""
    return torch.segment_reduce(values, "sum", offsets=offsets, initial=0)
