"""The slow way: all logits at once, differentiated by autograd. What the other implementations are compared with."""

from __future__ import annotations

import math

import torch

from .projection import Projection
from .row_statistics import LEAST, RowStatistics


def dense_projection(inputs: Projection) -> torch.Tensor:
    """`[N, V_local]` projection of all tokens on all head rows."""
    dtype = inputs.dtype
    projection = inputs.hidden.to(dtype) @ inputs.weight.to(dtype).T
    if inputs.bias is not None:
        projection = projection + inputs.bias.to(dtype)
    if inputs.low_rank is not None and inputs.lora_b is not None:
        projection = projection + inputs.low_rank.to(dtype) @ inputs.lora_b.to(dtype).T
    return projection


def full_statistics(logits: torch.Tensor, sampled: torch.Tensor) -> RowStatistics:
    """Statistics of whole rows.

    Args:
        logits: `[N, V_local]`.
        sampled: `[N]` int64, ids relative to the shard's start; those outside belong to other shards.
    """
    if logits.shape[1] == 0:
        nothing = logits.sum(dim=1)
        return RowStatistics(torch.full_like(nothing, -math.inf), nothing, nothing, nothing)
    maximum = logits.detach().amax(dim=1)
    shifted = (logits - maximum[:, None]).clamp(min=LEAST)
    exp = shifted.exp()
    inside = (sampled >= 0) & (sampled < logits.shape[1])
    column = sampled.clamp(0, logits.shape[1] - 1)
    target = torch.where(inside, logits.gather(1, column[:, None]).squeeze(1), 0)
    return RowStatistics(maximum, exp.sum(dim=1), (exp * shifted).sum(dim=1), target)
