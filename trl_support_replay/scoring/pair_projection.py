"""Logits of (token, candidate) pairs, differentiable, without the logits of anything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from .plan import CandidatePlan
from .precision import compute_dtype, full_precision


class PairProjection(torch.autograd.Function):
    """Projections of the plan's pairs, `[P]`, in float32 or float64.

    The products are those of the plan's blocks. Backward needs no logits, only the inputs: the gradient of the hidden
    states is a sum of head rows and that of a head row a sum of hidden states, both weighted by the pairs' gradients.

    Args of `apply`:
        hidden: `[N, H]`.
        weight: `[V_local, H]`.
        bias: `[V_local]` or `None`.
        low_rank: `[N, r]` or `None`, hidden states through the first LoRA factor, scaled.
        lora_b: `[V_local, r]` or `None`, the second LoRA factor.
        plan: the pairs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        low_rank: torch.Tensor | None,
        lora_b: torch.Tensor | None,
        plan: CandidatePlan,
    ) -> torch.Tensor:
        dtype = compute_dtype(hidden, weight)
        ctx.plan, ctx.dtype = plan, dtype
        ctx.save_for_backward(hidden, weight, bias, low_rank, lora_b)
        projection = hidden.new_empty(plan.num_pairs, dtype=dtype)
        with full_precision(hidden.device):
            for block in plan.blocks:
                block.dots(hidden, weight, projection)
            if low_rank is not None and lora_b is not None:
                addition = torch.empty_like(projection)
                for block in plan.blocks:
                    block.dots(low_rank, lora_b, addition)
                projection += addition
            if bias is not None:
                projection += bias[plan.pair_ids].to(dtype)
        return projection

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, low_rank, lora_b = ctx.saved_tensors
        plan, needed = ctx.plan, ctx.needs_input_grad
        grad = grad.to(ctx.dtype).contiguous()
        grad_bias = None
        with full_precision(hidden.device):
            if needed[2]:
                # Unlike index_add_, this has a fixed order on a GPU too.
                grad_bias = torch.zeros_like(bias, dtype=ctx.dtype)
                grad_bias = grad_bias.index_put_((plan.pair_ids,), grad, accumulate=True).to(bias.dtype)
            return (
                _grad_states(grad, hidden, weight, plan) if needed[0] else None,
                _grad_rows(grad, hidden, weight, plan) if needed[1] else None,
                grad_bias,
                _grad_states(grad, low_rank, lora_b, plan) if needed[3] else None,
                _grad_rows(grad, low_rank, lora_b, plan) if needed[4] else None,
                None,
            )


def _grad_states(grad: torch.Tensor, states: torch.Tensor, rows: torch.Tensor, plan: CandidatePlan) -> torch.Tensor:
    out = torch.zeros_like(states, dtype=grad.dtype)
    for block in plan.blocks:
        block.grad_states(grad, rows, out)
    return out.to(states.dtype)


def _grad_rows(grad: torch.Tensor, states: torch.Tensor, rows: torch.Tensor, plan: CandidatePlan) -> torch.Tensor:
    out = zero_matrix(rows)
    if rows.dtype == grad.dtype:
        for block in plan.blocks:
            block.grad_rows(grad, states, out, compact=False)
        return out
    # Half-precision weights: add up in full precision, but only the rows that occur.
    total = grad.new_zeros(len(plan.union), rows.shape[1])
    for block in plan.blocks:
        block.grad_rows(grad, states, total, compact=True)
    return out.index_copy_(0, plan.union, total.to(rows.dtype))


def zero_matrix(like: torch.Tensor) -> torch.Tensor:
    """Zeros of the shape of a head weight.

    On a CPU they are pages that the operating system clears when they are first touched, huge ones where it has them:
    few rows of the gradient are written, and clearing the whole of it first takes longer than all products together.
    """
    if like.device.type != "cpu" or like.dtype not in (torch.float32, torch.float64):
        return torch.zeros_like(like)
    return torch.from_numpy(np.zeros(like.shape, dtype=np.float32 if like.dtype == torch.float32 else np.float64))
