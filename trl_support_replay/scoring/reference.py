"""The slow way: all logits at once, differentiated by autograd. What the other implementations are compared with."""

from __future__ import annotations

import torch

from .precision import compute_dtype
from .row_statistics import RowStatistics


def dense_projection(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    low_rank: torch.Tensor | None,
    lora_b: torch.Tensor | None,
) -> torch.Tensor:
    """`[N, V_local]` projection of all tokens on all head rows; arguments as in `PairProjection`."""
    dtype = compute_dtype(hidden, weight)
    projection = hidden.to(dtype) @ weight.to(dtype).T
    if bias is not None:
        projection = projection + bias.to(dtype)
    if low_rank is not None and lora_b is not None:
        projection = projection + low_rank.to(dtype) @ lora_b.to(dtype).T
    return projection


def full_statistics(logits: torch.Tensor, sampled: torch.Tensor) -> RowStatistics:
    """Statistics of whole rows.

    Args:
        logits: `[N, V_local]`.
        sampled: `[N]` int64, ids relative to the shard's start; those outside belong to other shards.
    """
    maximum = logits.detach().amax(dim=1)
    shifted = logits - maximum[:, None]
    exp = shifted.exp()
    inside = (sampled >= 0) & (sampled < logits.shape[1])
    column = sampled.clamp(0, logits.shape[1] - 1)
    target = torch.where(inside, logits.gather(1, column[:, None]).squeeze(1), 0)
    return RowStatistics(maximum, exp.sum(dim=1), (exp * shifted).sum(dim=1), target)
