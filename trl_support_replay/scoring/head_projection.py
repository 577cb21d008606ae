"""The head's projection as one node of autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .full_projection import project_vocabulary, vocabulary_gradients
from .pair_projection import add_pair_gradients, project_pairs
from .plan import CandidatePlan
from .precision import full_precision
from .projection import Gradients, LogitTransform, Needs, Projection
from .row_statistics import RowStatistics


class HeadProjection(torch.autograd.Function):
    """`(pair_projections, max, sum_exp, sum_zexp, target)` of the plan's pairs and of tokens over the whole vocabulary.

    One node whatever is asked for, and on ranks without any token too: sharded parameters are gathered for it once in
    forward and once in backward, and ranks that differ in what they score still agree on the number of collectives.
    Nothing but the inputs is kept for backward.

    The last four outputs are statistics as in `row_statistics`: of all tokens if `whole_vocabulary`, whose projection
    then also gives the pairs; else of the plan's `empty_rows` alone.

    Args of `apply`:
        plan: the pairs.
        transform: from projection to logit.
        sampled: `[N]` int64, sampled ids relative to this shard's start.
        whole_vocabulary: whether statistics of all tokens are wanted.
        inputs: the fields of `Projection`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: CandidatePlan,
        transform: LogitTransform,
        sampled: torch.Tensor,
        whole_vocabulary: bool,
        *tensors: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        # Statistics that only go into a log get no gradient, and cost nothing in backward.
        ctx.set_materialize_grads(False)
        inputs = Projection(*tensors)
        tile_pairs = plan.tile_pairs if whole_vocabulary else None
        with full_precision(inputs.hidden.device):
            if tile_pairs is not None:
                statistics, pairs = project_vocabulary(inputs, transform, sampled, tile_pairs)
            else:
                pairs = project_pairs(inputs, plan)
                at_empty = inputs.at(plan.empty_rows), transform, sampled[plan.empty_rows]
                statistics, _ = project_vocabulary(*at_empty, None)
        ctx.plan, ctx.transform, ctx.tile_pairs = plan, transform, tile_pairs
        ctx.save_for_backward(*inputs, sampled, statistics.max)
        ctx.mark_non_differentiable(statistics.max)
        return pairs, statistics.max, statistics.sum_exp, statistics.sum_zexp, statistics.target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_pairs: Any, _: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        *tensors, sampled, maximum = ctx.saved_tensors
        inputs, plan, total = Projection(*tensors), ctx.plan, Gradients(Needs(*ctx.needs_input_grad[4:]))
        whole_vocabulary = ctx.tile_pairs is not None
        with full_precision(inputs.hidden.device):
            if len(maximum) and any(grad is not None for grad in grads):
                statistics = RowStatistics(maximum, *(torch.zeros_like(maximum) if g is None else g for g in grads))
                if whole_vocabulary:
                    vocabulary_gradients(
                        statistics, maximum, grad_pairs, inputs, ctx.transform, sampled, ctx.tile_pairs, total
                    )
                    return (None,) * 4 + total.as_inputs(inputs)
                rows = plan.empty_rows
                vocabulary_gradients(
                    statistics, maximum, None, inputs.at(rows), ctx.transform, sampled[rows], None, total
                )
                for name in ("hidden", "low_rank"):
                    part, x = getattr(total, name), getattr(inputs, name)
                    if part is not None:
                        spread = part.new_zeros(x.shape).index_copy_(0, rows, part)
                        setattr(total, name, spread)
            if grad_pairs is None:
                grad_pairs = maximum.new_zeros(plan.num_pairs)
            add_pair_gradients(grad_pairs, inputs, plan, total)
        return (None,) * 4 + total.as_inputs(inputs)
