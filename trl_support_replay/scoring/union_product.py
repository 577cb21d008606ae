"""Logits of (token, candidate) pairs by products over the union of a block's candidates."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .candidates import CandidatePlan
from .precision import compute_dtype, full_precision


class UnionProduct(torch.autograd.Function):
    """Logits of the plan's pairs, `[P]`, in float32 or float64.

    For each block of `n` tokens with `U` distinct candidates: gather `[U, H]` head rows, one `[n, H] x [H, U]` product,
    pick the pairs. Backward needs no logits: the gradient of the pairs, spread over `[n, U]`, gives the hidden gradient
    with one product and the gradient of the `U` rows with another, added where no two rows coincide, so that the result
    does not depend on the order of threads. Nothing is kept between the two but the inputs.

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
        logits = torch.empty(plan.num_pairs, dtype=dtype, device=hidden.device)
        with full_precision(hidden.device):
            for block in plan.blocks:
                tokens = plan.rows[block.rows]
                product = hidden[tokens].to(dtype) @ weight[block.union].to(dtype).T  # [n, U]
                if bias is not None:
                    product += bias[block.union].to(dtype)
                if low_rank is not None and lora_b is not None:
                    product.addmm_(low_rank[tokens].to(dtype), lora_b[block.union].to(dtype).T)
                logits[block.pairs] = product.view(-1)[block.flat_index]
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, low_rank, lora_b = ctx.saved_tensors
        plan, dtype = ctx.plan, ctx.dtype
        grad_hidden, grad_weight, grad_bias, grad_low_rank, grad_lora_b = (
            torch.zeros(x.shape, dtype=dtype, device=x.device) if needed else None
            for x, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[:5], strict=True)
        )
        with full_precision(hidden.device):
            for block in plan.blocks:
                tokens = plan.rows[block.rows]
                grad = torch.zeros(len(tokens), len(block.union), dtype=dtype, device=hidden.device)  # [n, U]
                grad.view(-1)[block.flat_index] = grad_logits[block.pairs].to(dtype)
                if grad_hidden is not None:
                    grad_hidden[tokens] = grad @ weight[block.union].to(dtype)
                if grad_weight is not None:
                    grad_weight.index_add_(0, block.union, grad.T @ hidden[tokens].to(dtype))
                if grad_bias is not None:
                    grad_bias.index_add_(0, block.union, grad.sum(dim=0))
                if grad_low_rank is not None:
                    grad_low_rank[tokens] = grad @ lora_b[block.union].to(dtype)
                if grad_lora_b is not None:
                    grad_lora_b.index_add_(0, block.union, grad.T @ low_rank[tokens].to(dtype))
        return (
            *(
                None if grad is None else grad.to(x.dtype)
                for grad, x in zip(
                    (grad_hidden, grad_weight, grad_bias, grad_low_rank, grad_lora_b), ctx.saved_tensors, strict=True
                )
            ),
            None,
        )
