"""Statistics over the whole vocabulary, and the projections of given pairs, from one projection made in tiles."""

from __future__ import annotations

import math
from typing import Any

import torch

from . import tile_pairs
from .pair_projection import zero_matrix
from .projection import Gradients, LogitTransform, Projection
from .row_statistics import LEAST, RowStatistics
from .tile_pairs import TilePairs


def project_vocabulary(
    inputs: Projection, transform: LogitTransform, sampled: torch.Tensor, pairs: TilePairs | None
) -> tuple[RowStatistics, torch.Tensor | None]:
    """Statistics of all tokens over this shard's whole vocabulary, and the pairs' projections `[P]`.

    No more than one tile of logits is held at a time.

    Args:
        sampled: `[N]` int64, sampled ids relative to this shard's start; those outside belong to other shards.
        pairs: pairs whose projections are wanted besides.
    """
    sum_exp, sum_zexp, target = inputs.hidden.new_zeros(3, len(inputs.hidden), dtype=inputs.dtype).unbind()
    maximum = torch.full_like(target, -math.inf)
    picked = None if pairs is None else torch.empty(len(pairs.order), dtype=inputs.dtype, device=target.device)
    if len(inputs.hidden) == 0:
        return RowStatistics(maximum, sum_exp, sum_zexp, target), picked
    for j, vocab in enumerate(vocab_spans := _spans(len(inputs.weight), tile_pairs.TILE_VOCAB)):
        head = _HeadRows(inputs, vocab)
        for i, tokens in enumerate(_spans(len(inputs.hidden), tile_pairs.TILE_TOKENS)):
            projection, _, _ = head.project(inputs, tokens)  # [n, v]
            if pairs is not None and picked is not None:
                here = pairs.of_tile(i * len(vocab_spans) + j)
                picked[pairs.order[here]] = projection[pairs.rows[here], pairs.ids[here]]
            logits = transform(projection)
            column, inside = _target_column(sampled[tokens], vocab)
            target[tokens] += torch.where(inside, logits.gather(1, column).squeeze(1), 0)
            new_max = torch.maximum(maximum[tokens], logits.amax(dim=1))
            logits.sub_(new_max[:, None]).clamp_(min=LEAST)
            exp = logits.exp()
            # Before the first tile the sums are 0 and their maximum minus infinity.
            shift = torch.where(maximum[tokens] == -math.inf, 0, maximum[tokens] - new_max)
            scale = shift.exp()
            sum_zexp[tokens] = (sum_zexp[tokens] + shift * sum_exp[tokens]) * scale
            sum_zexp[tokens] += torch.linalg.vecdot(exp, logits)
            sum_exp[tokens] = sum_exp[tokens] * scale + exp.sum(dim=1)
            maximum[tokens] = new_max
    return RowStatistics(maximum, sum_exp, sum_zexp, target), picked


def vocabulary_gradients(
    grad: RowStatistics,
    maximum: torch.Tensor,
    grad_picked: torch.Tensor | None,
    inputs: Projection,
    transform: LogitTransform,
    sampled: torch.Tensor,
    pairs: TilePairs | None,
    total: Gradients,
) -> None:
    """Set the wanted gradients to those of `project_vocabulary`; projects again, tile by tile.

    Args:
        grad: gradients of the statistics; that of the maximum is not looked at.
        maximum: `[N]`, as forward found it.
        grad_picked: `[P]`, gradient of the pairs' projections, or `None` for 0.
    """
    needs, dtype = total.needs, inputs.dtype
    # A token's gradient adds up over all vocabulary tiles. A head row's is complete after its own tile, so it is
    # rounded to the weight's dtype one tile at a time.
    if needs.hidden:
        total.hidden = torch.zeros_like(inputs.hidden, dtype=dtype)
    if needs.low_rank and inputs.low_rank is not None:
        total.low_rank = torch.zeros_like(inputs.low_rank, dtype=dtype)
    if needs.weight:
        total.weight = zero_matrix(inputs.weight)
    if needs.lora_b and inputs.lora_b is not None:
        total.lora_b = torch.zeros_like(inputs.lora_b, memory_format=torch.contiguous_format)
    if needs.bias and inputs.bias is not None:
        total.bias = torch.zeros_like(inputs.bias, dtype=dtype)
    grad_picked = None if grad_picked is None or pairs is None else grad_picked[pairs.order]
    constant = grad.sum_exp + grad.sum_zexp
    for j, vocab in enumerate(vocab_spans := _spans(len(inputs.weight), tile_pairs.TILE_VOCAB)):
        head = _HeadRows(inputs, vocab)
        weight_sum, lora_sum = (
            None if x is None else torch.zeros_like(x[vocab], dtype=dtype) for x in (total.weight, total.lora_b)
        )
        for i, tokens in enumerate(_spans(len(inputs.hidden), tile_pairs.TILE_TOKENS)):
            projection, states, low_rank = head.project(inputs, tokens)
            logits = transform(projection)
            shifted = (logits - maximum[tokens, None]).clamp_(min=LEAST)
            tile = shifted.exp() * torch.addcmul(constant[tokens, None], grad.sum_zexp[tokens, None], shifted)
            column, inside = _target_column(sampled[tokens], vocab)
            tile.scatter_add_(1, column, torch.where(inside, grad.target[tokens], 0)[:, None])
            transform.grad_(logits, tile)
            if grad_picked is not None and pairs is not None:
                here = pairs.of_tile(i * len(vocab_spans) + j)
                tile.view(-1)[pairs.rows[here] * tile.shape[1] + pairs.ids[here]] += grad_picked[here]
            if total.hidden is not None:
                total.hidden[tokens].addmm_(tile, head.weight)
            if total.low_rank is not None:
                total.low_rank[tokens].addmm_(tile, head.lora_b)
            if weight_sum is not None:
                weight_sum.addmm_(tile.T, states)
            if lora_sum is not None and low_rank is not None:
                lora_sum.addmm_(tile.T, low_rank)
            if total.bias is not None:
                total.bias[vocab] += tile.sum(dim=0)
        for whole, part in ((total.weight, weight_sum), (total.lora_b, lora_sum)):
            if whole is not None and part is not None:
                whole[vocab] = part.to(whole.dtype)


class _HeadRows:
    """The head's rows of one vocabulary tile, in the dtype of sums."""

    def __init__(self, inputs: Projection, vocab: slice) -> None:
        self.weight: Any
        self.lora_b: Any
        self.weight, self.bias, self.lora_b = (
            None if x is None else x[vocab].to(inputs.dtype) for x in (inputs.weight, inputs.bias, inputs.lora_b)
        )

    def project(self, inputs: Projection, tokens: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The tile's projections `[n, v]`, and the hidden states and low-rank states that they were made of."""
        states = inputs.hidden[tokens].to(inputs.dtype)
        low_rank = None if inputs.low_rank is None else inputs.low_rank[tokens].to(inputs.dtype)
        projection = states @ self.weight.T
        if self.bias is not None:
            projection += self.bias
        if low_rank is not None and self.lora_b is not None:
            projection.addmm_(low_rank, self.lora_b.T)
        return projection, states, low_rank


def _spans(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _target_column(sampled: torch.Tensor, vocab: slice) -> tuple[torch.Tensor, torch.Tensor]:
    inside = (sampled >= vocab.start) & (sampled < vocab.stop)
    column = (sampled - vocab.start).clamp(0, vocab.stop - vocab.start - 1)
    return column[:, None], inside
