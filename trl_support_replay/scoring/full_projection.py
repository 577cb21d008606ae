"""Statistics over the whole vocabulary, and the logits of given pairs, from one projection made in tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from .precision import compute_dtype, full_precision

TILE_TOKENS = 512
TILE_VOCAB = 8192


@dataclass(frozen=True)
class LogitTransform:
    """From projection to logit: `softcap * tanh(logit_scale * y / softcap) / temperature`."""

    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def __call__(self, projection: torch.Tensor) -> torch.Tensor:
        if self.softcap is None:
            return projection * (self.logit_scale / self.temperature)
        return torch.tanh(projection * (self.logit_scale / self.softcap)) * (self.softcap / self.temperature)

    def grad_(self, logits: torch.Tensor, grad_logits: torch.Tensor) -> torch.Tensor:
        """Turn the gradient of the logits into that of the projection, in place."""
        if self.softcap is not None:
            grad_logits *= 1 - (logits * (self.temperature / self.softcap)) ** 2
        return grad_logits.mul_(self.logit_scale / self.temperature)


@dataclass(frozen=True)
class TilePairs:
    """Pairs whose logits are read off the tiles, sorted by tile.

    Attributes:
        order: `[P]` int64, place of each sorted pair in the caller's order.
        rows, ids: `[P]` int64, token and local vocabulary row within the tile.
        starts: `[tiles + 1]`, the pairs of tile `i * num_vocab_tiles + j`, `i` counting tokens and `j` vocabulary.
    """

    order: torch.Tensor
    rows: torch.Tensor
    ids: torch.Tensor
    starts: list[int]

    def of_tile(self, index: int) -> slice:
        return slice(self.starts[index], self.starts[index + 1])

    @classmethod
    def build(
        cls, rows: np.ndarray, ids: np.ndarray, num_tokens: int, num_vocab: int, device: torch.device
    ) -> TilePairs:
        """Args: `rows` and `ids` `[P]`, token and local vocabulary row of each pair."""
        across = max(1, -(-num_vocab // TILE_VOCAB))
        down = -(-num_tokens // TILE_TOKENS)
        tile = rows // TILE_TOKENS * across + ids // TILE_VOCAB
        order = np.argsort(tile, kind="stable")
        starts = np.searchsorted(tile[order], np.arange(down * across + 1))
        packed = np.stack([order, rows[order] % TILE_TOKENS, ids[order] % TILE_VOCAB])
        tensors = torch.from_numpy(packed)
        if device.type == "cuda":
            tensors = tensors.pin_memory()
        places, rows_in_tile, ids_in_tile = tensors.to(device, non_blocking=True).unbind(0)
        return cls(places, rows_in_tile, ids_in_tile, starts.tolist())


def _spans(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


class FullProjection(torch.autograd.Function):
    """`(pair_logits, max, sum_exp, sum_zexp, target)` of all tokens over this shard's whole vocabulary.

    No more than one tile of logits is held at a time; backward projects again, tile by tile. See `row_statistics` for
    the meaning of the statistics.

    Args of `apply`:
        hidden, weight, bias, low_rank, lora_b: as in `PairProjection`.
        transform: from projection to logit.
        sampled: `[N]` int64, sampled ids relative to this shard's start.
        pairs: pairs whose logits are wanted besides.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        low_rank: torch.Tensor | None,
        lora_b: torch.Tensor | None,
        transform: LogitTransform,
        sampled: torch.Tensor,
        pairs: TilePairs,
    ) -> tuple[torch.Tensor, ...]:
        dtype = compute_dtype(hidden, weight)
        ctx.transform, ctx.pairs, ctx.dtype = transform, pairs, dtype
        num_tokens = len(hidden)
        sum_exp, sum_zexp, target = hidden.new_zeros(3, num_tokens, dtype=dtype).unbind()
        maximum = torch.full_like(target, -math.inf)
        picked = hidden.new_empty(len(pairs.order), dtype=dtype)
        with full_precision(hidden.device):
            for j, vocab in enumerate(vocab_spans := _spans(len(weight), TILE_VOCAB)):
                weight_rows, bias_rows, lora_rows = _rows(vocab, dtype, weight, bias, lora_b)
                for i, tokens in enumerate(_spans(num_tokens, TILE_TOKENS)):
                    states, low = _rows(tokens, dtype, hidden, low_rank)
                    logits = transform(_project(states, weight_rows, bias_rows, low, lora_rows))
                    here = pairs.of_tile(i * len(vocab_spans) + j)
                    picked[pairs.order[here]] = logits[pairs.rows[here], pairs.ids[here]]
                    column, inside = _target_column(sampled[tokens], vocab)
                    target[tokens] += torch.where(inside, logits.gather(1, column).squeeze(1), 0)
                    new_max = torch.maximum(maximum[tokens], logits.amax(dim=1))
                    logits -= new_max[:, None]
                    exp = logits.exp()
                    # Before the first tile the sums are 0 and their maximum minus infinity.
                    shift = torch.where(maximum[tokens] == -math.inf, 0, maximum[tokens] - new_max)
                    scale = shift.exp()
                    sum_zexp[tokens] = (sum_zexp[tokens] + shift * sum_exp[tokens]) * scale
                    sum_zexp[tokens] += torch.linalg.vecdot(exp, logits)
                    sum_exp[tokens] = sum_exp[tokens] * scale + exp.sum(dim=1)
                    maximum[tokens] = new_max
        ctx.save_for_backward(hidden, weight, bias, low_rank, lora_b, sampled, maximum)
        ctx.mark_non_differentiable(maximum)
        return picked, maximum, sum_exp, sum_zexp, target

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_picked: torch.Tensor,
        _: Any,
        grad_sum: torch.Tensor,
        grad_zsum: torch.Tensor,
        grad_target: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        *inputs, sampled, maximum = ctx.saved_tensors
        hidden, weight, bias, low_rank, lora_b = inputs
        pairs, dtype, transform = ctx.pairs, ctx.dtype, ctx.transform
        grad_picked = grad_picked[pairs.order]
        # A token's gradient adds up over all vocabulary tiles. A head row's is complete after its own tile, so it is
        # rounded to the weight's dtype one tile at a time.
        grad_hidden, grad_low_rank = (
            torch.zeros(x.shape, dtype=dtype, device=x.device) if ctx.needs_input_grad[i] else None
            for i, x in ((0, hidden), (3, low_rank))
        )
        grad_weight, grad_bias, grad_lora_b = (
            torch.empty_like(x) if ctx.needs_input_grad[i] else None for i, x in ((1, weight), (2, bias), (4, lora_b))
        )
        with full_precision(hidden.device):
            for j, vocab in enumerate(vocab_spans := _spans(len(weight), TILE_VOCAB)):
                weight_rows, bias_rows, lora_rows = _rows(vocab, dtype, weight, bias, lora_b)
                weight_sum, bias_sum, lora_sum = (
                    None if x is None else torch.zeros(x[vocab].shape, dtype=dtype, device=x.device)
                    for x in (grad_weight, grad_bias, grad_lora_b)
                )
                for i, tokens in enumerate(_spans(len(hidden), TILE_TOKENS)):
                    states, low = _rows(tokens, dtype, hidden, low_rank)
                    logits = transform(_project(states, weight_rows, bias_rows, low, lora_rows))
                    shifted = logits - maximum[tokens, None]
                    grad = shifted.exp() * torch.addcmul(
                        (grad_sum + grad_zsum)[tokens, None], grad_zsum[tokens, None], shifted
                    )
                    column, inside = _target_column(sampled[tokens], vocab)
                    grad.scatter_add_(1, column, torch.where(inside, grad_target[tokens], 0)[:, None])
                    here = pairs.of_tile(i * len(vocab_spans) + j)
                    grad.view(-1)[pairs.rows[here] * grad.shape[1] + pairs.ids[here]] += grad_picked[here]
                    transform.grad_(logits, grad)
                    if grad_hidden is not None:
                        grad_hidden[tokens].addmm_(grad, weight_rows)
                    if grad_low_rank is not None:
                        grad_low_rank[tokens].addmm_(grad, lora_rows)
                    if weight_sum is not None:
                        weight_sum.addmm_(grad.T, states)
                    if bias_sum is not None:
                        bias_sum += grad.sum(dim=0)
                    if lora_sum is not None:
                        lora_sum.addmm_(grad.T, low)
                for whole, part in ((grad_weight, weight_sum), (grad_bias, bias_sum), (grad_lora_b, lora_sum)):
                    if whole is not None and part is not None:
                        whole[vocab] = part
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            grad_weight,
            grad_bias,
            None if grad_low_rank is None else grad_low_rank.to(low_rank.dtype),
            grad_lora_b,
            None,
            None,
            None,
        )


def _rows(vocab: slice, dtype: torch.dtype, *tensors: torch.Tensor | None) -> list[Any]:
    return [None if x is None else x[vocab].to(dtype) for x in tensors]


def _project(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    low_rank: torch.Tensor | None,
    lora_b: torch.Tensor | None,
) -> torch.Tensor:
    product = hidden @ weight.T
    if bias is not None:
        product += bias
    if low_rank is not None and lora_b is not None:
        product.addmm_(low_rank, lora_b.T)
    return product


def _target_column(sampled: torch.Tensor, vocab: slice) -> tuple[torch.Tensor, torch.Tensor]:
    inside = (sampled >= vocab.start) & (sampled < vocab.stop)
    column = (sampled - vocab.start).clamp(0, vocab.stop - vocab.start - 1)
    return column[:, None], inside
