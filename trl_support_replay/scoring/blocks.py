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


Columns = torch.Tensor | slice
"""Head rows that are columns of a product: `[u]` int64 indices, or a run of rows, which is read in place."""


@dataclass(frozen=True)
class UnionBlock:
    """Tokens whose pairs are read off one product of all tokens with all their distinct candidates.

    Attributes:
        tokens: `[n]` int64.
        parts: the `U` columns of the product, in parts: gathered head rows take much memory.
        places: the same in the plan's union.
        pairs: slice of the plan's pairs, `p` long, token after token.
        cells: `[p]` int64, each pair's place in the flattened `[n, U]` product, none twice.
    """

    tokens: torch.Tensor
    parts: tuple[Columns, ...]
    places: tuple[Columns, ...]
    pairs: slice
    cells: torch.Tensor

    def dots(self, states: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        states = states[self.tokens].to(out.dtype)
        products = [states @ rows[part].to(out.dtype).T for part in self.parts]
        product = products[0] if len(products) == 1 else torch.cat(products, 1)  # [n, U]
        torch.index_select(product.view(-1), 0, self.cells, out=out[self.pairs])

    def grad_states(self, grad: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        total = out.new_zeros(len(self.tokens), rows.shape[1])
        for part, cells in zip(self.parts, self._spread(grad), strict=True):
            total.addmm_(cells, rows[part].to(grad.dtype))
        out[self.tokens] = total

    def grad_rows(self, grad: torch.Tensor, states: torch.Tensor, out: torch.Tensor, compact: bool) -> None:
        states = states[self.tokens].to(grad.dtype)
        parts = self.places if compact else self.parts
        for part, cells in zip(parts, self._spread(grad), strict=True):
            if isinstance(part, slice):
                out[part].addmm_(cells.T, states)
            else:
                out.index_add_(0, part, cells.T @ states)

    def _spread(self, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The pairs' gradients as the parts of the product, 0 elsewhere."""
        widths = [x.stop - x.start if isinstance(x, slice) else len(x) for x in self.parts]
        cells = grad.new_zeros(len(self.tokens), sum(widths))
        cells.view(-1).scatter_(0, self.cells, grad[self.pairs])
        return cells.split(widths, 1)


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
