"""Projections of (token, candidate) pairs, and their gradients, without the logits of anything else."""

from __future__ import annotations

import numpy as np
import torch

from .plan import CandidatePlan
from .projection import Gradients, Projection


def project_pairs(inputs: Projection, plan: CandidatePlan) -> torch.Tensor:
    """`[P]` projections of the plan's pairs, by the products of the plan's blocks."""
    projection = inputs.hidden.new_empty(plan.num_pairs, dtype=inputs.dtype)
    for block in plan.blocks:
        block.dots(inputs.hidden, inputs.weight, projection)
    if inputs.low_rank is not None and inputs.lora_b is not None:
        addition = torch.empty_like(projection)
        for block in plan.blocks:
            block.dots(inputs.low_rank, inputs.lora_b, addition)
        projection += addition
    if inputs.bias is not None:
        projection += inputs.bias[plan.pair_ids].to(projection.dtype)
    return projection


def add_pair_gradients(grad: torch.Tensor, inputs: Projection, plan: CandidatePlan, total: Gradients) -> None:
    """Add the gradients of the pairs' projections to those that are wanted.

    No logits are needed: the gradient of a hidden state is a sum of head rows, that of a head row a sum of hidden
    states, both weighted by the pairs' gradients.

    Args:
        grad: `[P]`, of the projections.
        total: parts that are `None` where nothing has been added so far.
    """
    grad = grad.to(inputs.dtype).contiguous()
    if total.needs.hidden:
        total.hidden = _grad_states(grad, inputs.hidden, inputs.weight, plan, total.hidden)
    if total.needs.weight:
        total.weight = _grad_rows(grad, inputs.hidden, inputs.weight, plan, total.weight)
    low_rank, lora_b = inputs.low_rank, inputs.lora_b
    if total.needs.low_rank and low_rank is not None and lora_b is not None:
        total.low_rank = _grad_states(grad, low_rank, lora_b, plan, total.low_rank)
    if total.needs.lora_b and low_rank is not None and lora_b is not None:
        total.lora_b = _grad_rows(grad, low_rank, lora_b, plan, total.lora_b)
    if total.needs.bias and inputs.bias is not None:
        # Unlike index_add_, this has a fixed order on a GPU too.
        part = torch.zeros_like(inputs.bias, dtype=grad.dtype).index_put_((plan.pair_ids,), grad, accumulate=True)
        total.bias = part if total.bias is None else total.bias + part


def _grad_states(
    grad: torch.Tensor, states: torch.Tensor, rows: torch.Tensor, plan: CandidatePlan, total: torch.Tensor | None
) -> torch.Tensor:
    # Kernels write whole rows: the strides of column-major states are not kept.
    out = torch.zeros_like(states, dtype=grad.dtype, memory_format=torch.contiguous_format)
    for block in plan.blocks:
        block.grad_states(grad, rows, out)
    return out if total is None else total + out


def _grad_rows(
    grad: torch.Tensor, states: torch.Tensor, rows: torch.Tensor, plan: CandidatePlan, total: torch.Tensor | None
) -> torch.Tensor:
    total = zero_matrix(rows) if total is None else total
    if rows.dtype == grad.dtype:
        for block in plan.blocks:
            block.grad_rows(grad, states, total, compact=False)
        return total
    # Half-precision weights: add up in full precision, but only the rows that occur.
    part = grad.new_zeros(len(plan.union), rows.shape[1])
    for block in plan.blocks:
        block.grad_rows(grad, states, part, compact=True)
    part += total[plan.union]
    return total.index_copy_(0, plan.union, part.to(rows.dtype))


def zero_matrix(like: torch.Tensor) -> torch.Tensor:
    """Zeros of the shape of a head weight.

    On a CPU they are pages that the operating system clears when they are first touched, huge ones where it has them:
    few rows of the gradient are written, and clearing the whole of it first takes longer than all products together.
    """
    if like.device.type != "cpu" or like.dtype not in (torch.float32, torch.float64):
        return torch.zeros_like(like, memory_format=torch.contiguous_format)
    return torch.from_numpy(np.zeros(like.shape, dtype=np.float32 if like.dtype == torch.float32 else np.float64))
