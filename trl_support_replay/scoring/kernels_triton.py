"""The three products on (token, candidate) pairs as Triton kernels; see `blocks` for what they compute.

Head rows and hidden states are read in place, in their own dtype, and added up in the dtype of the result. Every output
element has one program that adds its terms in a fixed order: no atomics, and the same bits at every run.

The sizes of tiles are a trade of registers against the length of loads, and untuned. Tests run
these kernels under Triton's interpreter, and compile them for sm_80 and sm_90.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK_PAIRS = 16
BLOCK_WIDTH = 256


@triton.jit
def dots_kernel(
    states_ptr,  # [N, K]
    rows_ptr,  # [V, K]
    tokens_ptr,  # [p]
    ids_ptr,  # [p]
    out_ptr,  # [p]
    num_pairs,
    width,
    states_stride,
    rows_stride,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    pairs = tl.program_id(0) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    inside = pairs < num_pairs
    # 64-bit: a head has more than 2^31 elements.
    token = tl.load(tokens_ptr + pairs, mask=inside, other=0).to(tl.int64)
    row = tl.load(ids_ptr + pairs, mask=inside, other=0).to(tl.int64)
    total = tl.zeros((BLOCK_PAIRS,), out_ptr.dtype.element_ty)
    for start in range(0, width, BLOCK_WIDTH):
        column = start + tl.arange(0, BLOCK_WIDTH)
        mask = inside[:, None] & (column < width)[None, :]
        x = tl.load(states_ptr + token[:, None] * states_stride + column[None, :], mask=mask, other=0.0)
        w = tl.load(rows_ptr + row[:, None] * rows_stride + column[None, :], mask=mask, other=0.0)
        total += tl.sum(x.to(total.dtype) * w.to(total.dtype), axis=1)
    tl.store(out_ptr + pairs, total, mask=inside)


@triton.jit
def weighted_sum_kernel(
    values_ptr,  # [P], weights of the terms
    source_ptr,  # [S, K], rows that are added up
    offsets_ptr,  # [m + 1], the terms of each sum
    order_ptr,  # [p], which value and
    index_ptr,  # [p], which source row a term takes
    target_ptr,  # [m], row of `out` that a sum belongs to
    out_ptr,  # [M, K]
    width,
    source_stride,
    out_stride,
    ACCUMULATE: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    i = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    in_width = column < width
    first = tl.load(offsets_ptr + i)
    last = tl.load(offsets_ptr + i + 1)
    total = tl.zeros((BLOCK_WIDTH,), out_ptr.dtype.element_ty)
    for start in range(first, last, BLOCK_PAIRS):
        terms = start + tl.arange(0, BLOCK_PAIRS)
        inside = terms < last
        value = tl.load(values_ptr + tl.load(order_ptr + terms, mask=inside, other=0), mask=inside, other=0.0)
        row = tl.load(index_ptr + terms, mask=inside, other=0).to(tl.int64)
        mask = inside[:, None] & in_width[None, :]
        x = tl.load(source_ptr + row[:, None] * source_stride + column[None, :], mask=mask, other=0.0)
        total += tl.sum(value.to(total.dtype)[:, None] * x.to(total.dtype), axis=0)
    out = out_ptr + tl.load(target_ptr + i).to(tl.int64) * out_stride + column
    if ACCUMULATE:
        total += tl.load(out, mask=in_width, other=0.0)
    tl.store(out, total, mask=in_width)


@dataclass(frozen=True)
class TritonBlock:
    """Tokens whose pairs are computed one by one on a GPU.

    Attributes:
        tokens: `[n]` int64.
        pairs: slice of the plan's pairs, `p` long, token after token.
        row_offsets: `[n + 1]` int64, the pairs of each token.
        pair_tokens, pair_ids: `[p]` int64, token and head row of each pair.
        ids: `[u]` int64, sorted distinct head rows.
        places: `[u]` int64, the same in the plan's union.
        id_offsets: `[u + 1]` int64, the pairs of each head row when sorted by head row.
        by_id: `[p]` int64, that order.
        tokens_by_id: `[p]` int64, the tokens in that order.
        in_order: `[p]` int64, 0 to `p - 1`.
    """

    tokens: torch.Tensor
    pairs: slice
    row_offsets: torch.Tensor
    pair_tokens: torch.Tensor
    pair_ids: torch.Tensor
    ids: torch.Tensor
    places: torch.Tensor
    id_offsets: torch.Tensor
    by_id: torch.Tensor
    tokens_by_id: torch.Tensor
    in_order: torch.Tensor

    def dots(self, states: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        states, rows = _dense_rows(states), _dense_rows(rows)
        num_pairs = len(self.pair_ids)
        with torch.cuda.device_of(out):  # Triton launches on the current device
            dots_kernel[(triton.cdiv(num_pairs, BLOCK_PAIRS),)](
                states,
                rows,
                self.pair_tokens,
                self.pair_ids,
                out[self.pairs],
                num_pairs,
                rows.shape[1],
                states.stride(0),
                rows.stride(0),
                BLOCK_PAIRS=BLOCK_PAIRS,
                BLOCK_WIDTH=BLOCK_WIDTH,
            )

    def grad_states(self, grad: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        terms = (self.row_offsets, self.in_order, self.pair_ids)
        _weighted_sums(grad[self.pairs], rows, *terms, self.tokens, out, accumulate=False)

    def grad_rows(self, grad: torch.Tensor, states: torch.Tensor, out: torch.Tensor, compact: bool) -> None:
        terms = (self.id_offsets, self.by_id, self.tokens_by_id)
        target = self.places if compact else self.ids
        _weighted_sums(grad[self.pairs], states, *terms, target, out, accumulate=True)


def _weighted_sums(
    values: torch.Tensor,
    source: torch.Tensor,
    offsets: torch.Tensor,
    order: torch.Tensor,
    index: torch.Tensor,
    target: torch.Tensor,
    out: torch.Tensor,
    accumulate: bool,
) -> None:
    if not len(target):
        return
    source = _dense_rows(source)
    width = source.shape[1]
    with torch.cuda.device_of(out):
        weighted_sum_kernel[(len(target), triton.cdiv(width, BLOCK_WIDTH))](
            values,
            source,
            offsets,
            order,
            index,
            target,
            out,
            width,
            source.stride(0),
            out.stride(0),
            ACCUMULATE=accumulate,
            BLOCK_PAIRS=BLOCK_PAIRS,
            BLOCK_WIDTH=BLOCK_WIDTH,
        )


def _dense_rows(matrix: torch.Tensor) -> torch.Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
