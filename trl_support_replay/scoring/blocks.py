"""Blocks of (token, candidate) pairs, and the three products on them.

With states `x [N, K]`, head rows `w [V, K]` and pairs `(t, v)`, a block computes

    dots         y_tv = x_t . w_v
    grad_states  dx_t = sum_v dy_tv w_v
    grad_rows    dw_v = sum_t dy_tv x_t

in the dtype of the pairs' values, whatever that of `x` and `w`. Every sum has a fixed order: no atomics.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

# Head-row gradients are added up in a buffer of this size, so that it stays in cache.
BUFFER_BYTES = 2**20


class Block(Protocol):
    """Some of a plan's pairs."""

    def dots(self, states: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Write the pairs' dot products to their places in `out [P]`."""

    def grad_states(self, grad: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Write the gradient of the block's tokens to their rows of `out [N, K]`, from `grad [P]`."""

    def grad_rows(self, grad: torch.Tensor, states: torch.Tensor, out: torch.Tensor, compact: bool) -> None:
        """Add the gradient of the head rows to `out`, `[V, K]`, or `[U, K]` over the plan's union if `compact`."""


@dataclass(frozen=True)
class UnionTile:
    """Some columns of a union product.

    Attributes:
        ids: `[u]` int64, their head rows.
        places: `[u]` int64, the same in the plan's union.
        pairs: `[p]` int64, pairs of the plan.
        cells: `[p]` int64, each pair's place in the flattened `[n, u]` product, none twice.
    """

    ids: torch.Tensor
    places: torch.Tensor
    pairs: torch.Tensor
    cells: torch.Tensor


@dataclass(frozen=True)
class UnionBlock:
    """Tokens whose pairs are read off one product of all tokens with all their distinct candidates.

    Attributes:
        tokens: `[n]` int64.
        tiles: the distinct candidates.
    """

    tokens: torch.Tensor
    tiles: tuple[UnionTile, ...]

    def dots(self, states: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        states = states[self.tokens].to(out.dtype)
        for tile in self.tiles:
            product = states @ rows[tile.ids].to(out.dtype).T  # [n, u]
            out[tile.pairs] = product.view(-1)[tile.cells]

    def grad_states(self, grad: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        total = out.new_zeros(len(self.tokens), rows.shape[1])
        for tile in self.tiles:
            total.addmm_(self._spread(grad, tile), rows[tile.ids].to(grad.dtype))
        out[self.tokens] = total

    def grad_rows(self, grad: torch.Tensor, states: torch.Tensor, out: torch.Tensor, compact: bool) -> None:
        states = states[self.tokens].to(grad.dtype)
        for tile in self.tiles:
            out.index_add_(0, tile.places if compact else tile.ids, self._spread(grad, tile).T @ states)

    def _spread(self, grad: torch.Tensor, tile: UnionTile) -> torch.Tensor:
        cells = grad.new_zeros(len(self.tokens), len(tile.ids))
        cells.view(-1)[tile.cells] = grad[tile.pairs]
        return cells


@dataclass(frozen=True)
class SparseBlock:
    """Tokens whose pairs are computed one by one, with sparse CPU kernels: head rows are read in place.

    Attributes:
        tokens: `[n]` int64.
        pairs: slice of the plan's pairs, `p` long, token after token.
        row_offsets: `[n + 1]` int64, the pairs of each token.
        pair_ids: `[p]` int64, head row of each pair.
        ids: `[u]` int64, sorted distinct head rows.
        places: `[u]` int64, the same in the plan's union.
        id_offsets: `[u + 1]` host int64, the pairs of each head row when sorted by head row.
        by_id: `[p]` int64, that order.
        rows_by_id: `[p]` int64, place in `tokens` of each pair in that order.
    """

    tokens: torch.Tensor
    pairs: slice
    row_offsets: torch.Tensor
    pair_ids: torch.Tensor
    ids: torch.Tensor
    places: torch.Tensor
    id_offsets: np.ndarray
    by_id: torch.Tensor
    rows_by_id: torch.Tensor

    def dots(self, states: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        pattern = self._by_token(out.new_zeros(len(self.pair_ids)), len(rows))
        product = torch.sparse.sampled_addmm(pattern, states[self.tokens].to(out.dtype), rows.T, beta=0.0)
        out[self.pairs] = product.values()

    def grad_states(self, grad: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        out[self.tokens] = torch.sparse.mm(self._by_token(grad[self.pairs], len(rows)), rows, "sum")

    def grad_rows(self, grad: torch.Tensor, states: torch.Tensor, out: torch.Tensor, compact: bool) -> None:
        states = states[self.tokens].to(grad.dtype)
        values = grad[self.pairs][self.by_id]
        target = self.places if compact else self.ids
        step = max(1, BUFFER_BYTES // (states.shape[1] * states.element_size()))
        for first in range(0, len(target), step):
            last = min(first + step, len(target))
            pairs = slice(int(self.id_offsets[first]), int(self.id_offsets[last]))
            offsets = torch.from_numpy(self.id_offsets[first : last + 1] - pairs.start)
            gradient = _sparse_csr(offsets, self.rows_by_id[pairs], values[pairs], len(states))
            out.index_add_(0, target[first:last], torch.sparse.mm(gradient, states, "sum"))

    def _by_token(self, values: torch.Tensor, num_columns: int) -> torch.Tensor:
        return _sparse_csr(self.row_offsets, self.pair_ids, values, num_columns)


def _sparse_csr(offsets: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, num_columns: int) -> torch.Tensor:
    _read_beta_notice()
    size = (len(offsets) - 1, num_columns)
    return torch.sparse_csr_tensor(offsets, columns, values, size=size, check_invariants=False)


@functools.cache
def _read_beta_notice() -> None:
    # PyTorch says once a process that its sparse rows are in beta; users of this package can do nothing about it.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0], [], [], size=(0, 0), check_invariants=False)
