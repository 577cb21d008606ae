"""`CandidatePlan`: which (token, candidate) pairs are projected, in which blocks, by which kind of product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .blocks import Block, SparseBlock, UnionBlock, UnionTile

# Tokens that share one union. A wide product wastes work on pairs that nobody asked for, a narrow one gathers rows more
# often and has more overhead: that of launches on a GPU, so wider there.
BLOCK_ROWS = {"cpu": 32, "cuda": 128}
# A union product on more columns is made in tiles.
TILE_COLUMNS = 8192

# What a union product costs, in units of one pair computed alone (a dot product that is bound by memory): per cell of
# the product, and per gathered row. Measured on one core with AVX-512, float32; see benchmarks/scorer_crossover.py.
CELL_COST = 1 / 32
GATHER_COST = 1.5


@dataclass(frozen=True)
class CandidatePlan:
    """Which (token, candidate) pairs one vocabulary shard projects, and in which blocks.

    Rows of one candidate are left out: their log-prob is 0 whatever the logit. Rows keep their place even when none of
    their candidates lies in this shard, so that every rank of a group holds the same rows.

    Attributes:
        rows: `[R]` int64, tokens with at least two candidates (over all shards), by size.
        pair_rows: `[P]` int64, for each pair the place of its token in `rows`, never falling.
        pair_ids: `[P]` int64, candidate ids relative to the shard's start, rising within a row.
        row_offsets: `[R + 1]` int64, the pairs of each row.
        empty_rows: `[E]` int64, tokens with no recorded candidate.
        sizes: `[N]` int64, candidates of each token, over all shards.
        owned: `[N]` int64, how many of them lie in this shard.
        lone_rows: `[S]` int64, tokens whose only candidate lies in this shard.
        lone_ids: `[S]` int64, those candidates, relative to the shard's start.
        num_ids: ids of the shard.
        union: `[U]` int64, sorted distinct candidates of the shard.
        blocks: cover all pairs, each once.
        host_rows, host_pair_rows, host_pair_ids: NumPy copies, for what follows from them.
    """

    rows: torch.Tensor
    pair_rows: torch.Tensor
    pair_ids: torch.Tensor
    row_offsets: torch.Tensor
    empty_rows: torch.Tensor
    sizes: torch.Tensor
    owned: torch.Tensor
    lone_rows: torch.Tensor
    lone_ids: torch.Tensor
    num_ids: int
    union: torch.Tensor
    blocks: tuple[Block, ...]
    host_rows: np.ndarray
    host_pair_rows: np.ndarray
    host_pair_ids: np.ndarray

    @property
    def num_pairs(self) -> int:
        return len(self.host_pair_ids)


def make_plan(
    ids: np.ndarray, offsets: np.ndarray, start: int, stop: int, *, kernel: str, device: torch.device
) -> CandidatePlan:
    """Plan the pairs whose candidate lies in `[start, stop)`.

    Args:
        ids: `[nnz]` integers, candidates of all rows.
        offsets: `[N + 1]` int64.
        kernel: "union" for union products only; "sparse" (CPU) and "triton" (CUDA) leave them to the blocks where they
            cost less than one dot product a pair.

    Raises:
        ValueError: an id twice in a row; a device that is neither a CPU nor a CUDA device.
    """
    if device.type not in BLOCK_ROWS:
        raise ValueError(
            f"Supports cannot be scored on {device.type!r}: the products and sums that this takes run on "
            f"{' and '.join(BLOCK_ROWS)} devices. Put the model on one of them, for example by use_cpu=True."
        )
    sizes = np.diff(offsets)
    # Rows of like size share a block, so that one wide row does not widen the product for many narrow ones.
    rows = np.flatnonzero(sizes > 1)
    rows = rows[np.argsort(sizes[rows], kind="stable")]
    place = np.full(len(sizes), -1, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    tokens = np.repeat(np.arange(len(sizes)), sizes)
    here = np.flatnonzero((ids >= start) & (ids < stop))
    tokens, local_ids = tokens[here], ids[here].astype(np.int64) - start
    paired = sizes[tokens] > 1
    pair_rows, pair_ids = place[tokens[paired]], local_ids[paired]
    order = np.lexsort((pair_ids, pair_rows))
    pair_rows, pair_ids = pair_rows[order], pair_ids[order]
    check_unique(rows[pair_rows], pair_ids + start)
    row_offsets = np.searchsorted(pair_rows, np.arange(len(rows) + 1))
    union, places = np.unique(pair_ids, return_inverse=True)
    return CandidatePlan(
        rows=to_device(rows, device),
        pair_rows=to_device(pair_rows, device),
        pair_ids=to_device(pair_ids, device),
        row_offsets=to_device(row_offsets, device),
        empty_rows=to_device(np.flatnonzero(sizes == 0), device),
        sizes=to_device(sizes, device),
        owned=to_device(np.bincount(tokens, minlength=len(sizes)), device),
        lone_rows=to_device(tokens[~paired], device),
        lone_ids=to_device(local_ids[~paired], device),
        num_ids=stop - start,
        union=to_device(union, device),
        blocks=_make_blocks(rows, row_offsets, pair_rows, union, places, kernel, device),
        host_rows=rows,
        host_pair_rows=pair_rows,
        host_pair_ids=pair_ids,
    )


def _make_blocks(
    rows: np.ndarray,
    row_offsets: np.ndarray,
    pair_rows: np.ndarray,
    union: np.ndarray,
    places: np.ndarray,
    kernel: str,
    device: torch.device,
) -> tuple[Block, ...]:
    def sparse(first: int, last: int) -> Block:
        pairs = slice(int(row_offsets[first]), int(row_offsets[last]))
        of_rows = rows[first:last], row_offsets[first : last + 1], pair_rows[pairs] - first, places[pairs]
        return _sparse_block(*of_rows, union, kernel, device)

    blocks: list[Block] = []
    step = BLOCK_ROWS[device.type]
    waiting = 0  # first row that no block covers yet
    for first in range(0, len(rows), step):
        last = min(first + step, len(rows))
        pairs = slice(int(row_offsets[first]), int(row_offsets[last]))
        columns, column = np.unique(places[pairs], return_inverse=True)
        union_cost = len(columns) * ((last - first) * CELL_COST + GATHER_COST)
        if kernel != "union" and len(column) <= union_cost:
            continue
        if waiting < first:
            blocks.append(sparse(waiting, first))
        cells = (pair_rows[pairs] - first, column)
        blocks.append(_union_block(rows[first:last], pairs.start, *cells, columns, union, device))
        waiting = last
    if waiting < len(rows):
        blocks.append(sparse(waiting, len(rows)))
    return tuple(blocks)


def _union_block(
    tokens: np.ndarray,
    first_pair: int,
    pair_rows: np.ndarray,
    pair_columns: np.ndarray,
    columns: np.ndarray,
    union: np.ndarray,
    device: torch.device,
) -> UnionBlock:
    tiles = []
    for start in range(0, len(columns), TILE_COLUMNS):
        places = columns[start : start + TILE_COLUMNS]
        inside = np.flatnonzero((pair_columns >= start) & (pair_columns < start + TILE_COLUMNS))
        tiles.append(
            UnionTile(
                ids=to_device(union[places], device),
                places=to_device(places, device),
                pairs=to_device(first_pair + inside, device),
                cells=to_device(pair_rows[inside] * len(places) + pair_columns[inside] - start, device),
            )
        )
    return UnionBlock(to_device(tokens, device), tuple(tiles))


def _sparse_block(
    tokens: np.ndarray,
    offsets: np.ndarray,
    pair_rows: np.ndarray,
    places: np.ndarray,
    union: np.ndarray,
    kernel: str,
    device: torch.device,
) -> Block:
    by_id = np.argsort(places, kind="stable")
    columns, starts = np.unique(places[by_id], return_index=True)
    id_offsets = np.append(starts, len(places))
    pairs = slice(int(offsets[0]), int(offsets[-1]))
    shared = {
        "tokens": to_device(tokens, device),
        "row_offsets": to_device(offsets - offsets[0], device),
        "pair_ids": to_device(union[places], device),
        "ids": to_device(union[columns], device),
        "places": to_device(columns, device),
        "by_id": to_device(by_id, device),
    }
    if kernel == "sparse":
        return SparseBlock(**shared, pairs=pairs, id_offsets=id_offsets, rows_by_id=to_device(pair_rows[by_id], device))
    from .kernels_triton import TritonBlock

    return TritonBlock(
        **shared,
        pairs=pairs,
        id_offsets=to_device(id_offsets, device),
        pair_tokens=to_device(tokens[pair_rows], device),
        tokens_by_id=to_device(tokens[pair_rows[by_id]], device),
        in_order=to_device(np.arange(len(places)), device),
    )


def check_unique(rows: np.ndarray, ids: np.ndarray) -> None:
    """Raises: ValueError: a row holds an id twice."""
    order = np.lexsort((ids, rows))
    rows, ids = rows[order], ids[order]
    repeats = np.flatnonzero((rows[1:] == rows[:-1]) & (ids[1:] == ids[:-1]))
    if len(repeats):
        raise ValueError(f"Support row {rows[repeats[0]]} holds id {ids[repeats[0]]} more than once.")


def to_device(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """A copy on the device, made without waiting for it."""
    tensor = torch.from_numpy(np.array(array))
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
