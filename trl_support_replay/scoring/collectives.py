"""The three collectives of a vocabulary-parallel score, as autograd sees them.

Every rank of the group computes the same loss from the same reduced values, so the gradient of a sum over ranks is each
rank's own incoming gradient, and the gradient of a value that all ranks share is the sum over ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def max_over_group(values: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """Elementwise maximum over ranks, without gradient."""
    values = values.detach()
    if group is not None:
        values = values.clone()
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values


def sum_over_group(values: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """Elementwise sum over ranks; the gradient passes unchanged."""
    return values if group is None else _SumForward.apply(values, group)


def share_with_group(group: ProcessGroup | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors themselves, held alike by all ranks; their gradients are summed over ranks in one collective."""
    return tensors if group is None else _SumBackward.apply(group, *tensors)


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        # In the widest dtype among them: half-precision partial sums would be rounded once a rank.
        flat = torch.cat([g.reshape(-1).to(torch.promote_types(g.dtype, torch.float32)) for g in grads])
        dist.all_reduce(flat, group=ctx.group)
        parts = flat.split([g.numel() for g in grads])
        return None, *(part.view(g.shape).to(g.dtype) for part, g in zip(parts, grads, strict=True))
