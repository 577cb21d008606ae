"""`SupportCSR`: the candidates of each token, on a device, with the plan by which they are projected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

# Tokens whose candidates are projected by one product.
BLOCK_ROWS = 128


@dataclass(frozen=True)
class Block:
    """A run of rows whose candidates are projected together.

    Attributes:
        rows: slice of the plan's rows, `n` long.
        pairs: slice of the plan's pairs, `p` long.
        union: `[U]` int64, sorted local vocabulary rows that occur among the block's candidates.
        flat_index: `[p]` int64, each pair's place in the flattened `[n, U]` product. No place occurs twice.
    """

    rows: slice
    pairs: slice
    union: torch.Tensor
    flat_index: torch.Tensor


@dataclass(frozen=True)
class CandidatePlan:
    """Which (token, candidate) pairs one vocabulary shard projects, and in which blocks.

    Rows of one candidate are left out: their log-prob is 0 whatever the logit. Rows keep their place even when none of
    their candidates lies in this shard, so that every rank of a group holds the same rows.

    Attributes:
        rows: `[R]` int64, tokens with at least two candidates (over all shards).
        pair_rows: `[P]` int64, for each pair the place of its token in `rows`, never falling.
        pair_ids: `[P]` int64, candidate ids relative to the shard's start, rising within a row.
        row_offsets: `[R + 1]` int64, the pairs of each row.
        singletons: `[N]` bool, tokens with exactly one candidate.
        empty_rows: `[E]` int64, tokens with no recorded candidate.
        blocks: cover all rows and pairs in order.
        host_pair_rows, host_pair_ids: NumPy copies, for plans that follow from this one.
    """

    rows: torch.Tensor
    pair_rows: torch.Tensor
    pair_ids: torch.Tensor
    row_offsets: torch.Tensor
    singletons: torch.Tensor
    empty_rows: torch.Tensor
    blocks: tuple[Block, ...]
    host_rows: np.ndarray
    host_pair_rows: np.ndarray
    host_pair_ids: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.host_rows)

    @property
    def num_pairs(self) -> int:
        return len(self.host_pair_ids)


@dataclass(frozen=True, eq=False)
class SupportCSR:
    """Supports of `N` tokens in compressed sparse rows, on the device that scores them.

    Scoring follows a plan that is made from host arrays, so that no step of training waits for the device. Build it
    with [`SupportCSR.from_numpy`]; one built from device tensors alone copies them to the host once.

    Attributes:
        token_ids: `[nnz]` int32 or int64, candidate ids, each at most once in a row.
        offsets: `[N + 1]` int64, row `i` is `token_ids[offsets[i]:offsets[i + 1]]`. An empty row has no recorded
            support.
    """

    token_ids: torch.Tensor
    offsets: torch.Tensor
    _host: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    _plans: dict[tuple[int, int], CandidatePlan] = field(default_factory=dict, repr=False)

    @classmethod
    def from_numpy(cls, token_ids: Any, offsets: Any, device: torch.device | str = "cpu") -> SupportCSR:
        """Supports from host arrays.

        Args:
            token_ids: `[nnz]` integers.
            offsets: `[N + 1]` integers from 0 to `nnz`, never falling.
            device: where the scores will be computed.

        Raises:
            ValueError: offsets that do not start at 0, fall somewhere, or do not end at `nnz`.
        """
        ids = np.asarray(token_ids)
        if ids.dtype not in (np.int32, np.int64):
            ids = ids.astype(np.int64)
        ends = np.asarray(offsets, dtype=np.int64)
        if ids.ndim != 1 or ends.ndim != 1 or len(ends) == 0:
            raise ValueError(
                f"Supports need token_ids [nnz] and offsets [N + 1], not shapes {ids.shape} and {ends.shape}."
            )
        if ends[0] != 0 or ends[-1] != len(ids):
            raise ValueError(f"offsets run from {ends[0]} to {ends[-1]}; {len(ids)} token ids need 0 to {len(ids)}.")
        falls = np.flatnonzero(np.diff(ends) < 0)
        if len(falls):
            raise ValueError(f"offsets fall from {ends[falls[0]]} to {ends[falls[0] + 1]} at row {falls[0]}.")
        return cls(_to_device(ids, device), _to_device(ends, device), _host={"token_ids": ids, "offsets": ends})

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> SupportCSR:
        """Supports from one list of ids a token."""
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        ids = np.fromiter((v for row in rows for v in row), dtype=np.int64, count=int(offsets[-1]))
        return cls.from_numpy(ids, offsets, device)

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def device(self) -> torch.device:
        return self.token_ids.device

    @property
    def host_token_ids(self) -> np.ndarray:
        if "token_ids" not in self._host:
            self._host["token_ids"] = self.token_ids.cpu().numpy()
        return self._host["token_ids"]

    @property
    def host_offsets(self) -> np.ndarray:
        if "offsets" not in self._host:
            self._host["offsets"] = self.offsets.cpu().numpy()
        return self._host["offsets"]

    def validate(self, sampled_ids: Any, vocab_size: int) -> None:
        """Check on the host that these are supports of these tokens. Rows without recorded support pass.

        Args:
            sampled_ids: `[N]` integers, the token drawn from each row. Host arrays; device tensors are copied.
            vocab_size: rows of the whole output head.

        Raises:
            ValueError: another number of tokens than rows, an id outside the vocabulary, an id twice in a row, or a
                row without its sampled token.
        """
        sampled = sampled_ids.cpu().numpy() if isinstance(sampled_ids, torch.Tensor) else np.asarray(sampled_ids)
        if sampled.shape != (len(self),):
            raise ValueError(f"{len(self)} supports for sampled_ids of shape {sampled.shape}.")
        ids, offsets = self.host_token_ids.astype(np.int64), self.host_offsets
        rows = np.repeat(np.arange(len(self)), np.diff(offsets))
        outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if len(outside):
            raise ValueError(
                f"Support row {rows[outside[0]]} has id {ids[outside[0]]}; the head has ids 0 to {vocab_size - 1}."
            )
        outside = np.flatnonzero((sampled < 0) | (sampled >= vocab_size))
        if len(outside):
            raise ValueError(
                f"sampled_ids[{outside[0]}] = {sampled[outside[0]]}; the head has ids 0 to {vocab_size - 1}."
            )
        _check_unique(rows, ids)
        hits = np.zeros(len(self), bool)
        hits[rows[ids == sampled[rows]]] = True
        missing = np.flatnonzero(~hits & (np.diff(offsets) > 0))
        if len(missing):
            row = missing[0]
            size = offsets[row + 1] - offsets[row]
            raise ValueError(
                f"Token {row} was sampled as id {sampled[row]}, which is not among the {size} ids of its support; so "
                f"for {len(missing)} of {len(self)} tokens. Supports and tokens are shifted "
                "against each other, or the support was recorded under other sampling settings."
            )

    def plan(self, start: int, stop: int) -> CandidatePlan:
        """The pairs whose candidate lies in `[start, stop)`; made on the first call, then kept."""
        key = (start, stop)
        if key not in self._plans:
            self._plans[key] = _make_plan(self.host_token_ids, self.host_offsets, start, stop, self.device)
        return self._plans[key]


def _make_plan(ids: np.ndarray, offsets: np.ndarray, start: int, stop: int, device: torch.device) -> CandidatePlan:
    sizes = np.diff(offsets)
    # Rows of like size share a block, so that one wide row does not widen the product for many narrow ones.
    rows = np.flatnonzero(sizes > 1)
    rows = rows[np.argsort(sizes[rows], kind="stable")]
    place = np.full(len(sizes), -1, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    pair_rows = place[np.repeat(np.arange(len(sizes)), sizes)]
    local = (pair_rows >= 0) & (ids >= start) & (ids < stop)
    pair_rows, pair_ids = pair_rows[local], ids[local].astype(np.int64) - start
    order = np.lexsort((pair_ids, pair_rows))
    pair_rows, pair_ids = pair_rows[order], pair_ids[order]
    _check_unique(rows[pair_rows], pair_ids + start)
    row_offsets = np.searchsorted(pair_rows, np.arange(len(rows) + 1))

    spans, unions, flat_indices = [], [], []
    for first in range(0, len(rows), BLOCK_ROWS):
        last = min(first + BLOCK_ROWS, len(rows))
        pairs = slice(int(row_offsets[first]), int(row_offsets[last]))
        union, column = np.unique(pair_ids[pairs], return_inverse=True)
        spans.append((slice(first, last), pairs))
        unions.append(union)
        flat_indices.append((pair_rows[pairs] - first) * len(union) + column)
    # One transfer for all blocks.
    union_parts = _split_to_device(unions, device)
    index_parts = _split_to_device(flat_indices, device)
    return CandidatePlan(
        rows=_to_device(rows, device),
        pair_rows=_to_device(pair_rows, device),
        pair_ids=_to_device(pair_ids, device),
        row_offsets=_to_device(row_offsets, device),
        singletons=_to_device(sizes == 1, device),
        empty_rows=_to_device(np.flatnonzero(sizes == 0), device),
        blocks=tuple(
            Block(span, pairs, union, index)
            for (span, pairs), union, index in zip(spans, union_parts, index_parts, strict=True)
        ),
        host_rows=rows,
        host_pair_rows=pair_rows,
        host_pair_ids=pair_ids,
    )


def _check_unique(rows: np.ndarray, ids: np.ndarray) -> None:
    order = np.lexsort((ids, rows))
    rows, ids = rows[order], ids[order]
    repeats = np.flatnonzero((rows[1:] == rows[:-1]) & (ids[1:] == ids[:-1]))
    if len(repeats):
        raise ValueError(f"Support row {rows[repeats[0]]} holds id {ids[repeats[0]]} more than once.")


def _to_device(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(array))
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _split_to_device(arrays: list[np.ndarray], device: torch.device) -> tuple[torch.Tensor, ...]:
    if not arrays:
        return ()
    return _to_device(np.concatenate(arrays), device).split([len(x) for x in arrays])
