"""`CandidatePlan`: which (token, candidate) pairs are projected, in which blocks, by which kind of product.

A plan is made on the host, by sorting one array of integers, and sent to the device by one copy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from .blocks import Block, Columns, SparseBlock, UnionBlock
from .shifts import PairShifts
from .tile_pairs import TilePairs
from .wide_rows import RepeatedIdError, first_wide_row, wide_blocks

Planned = TypeVar("Planned")

# Tokens that share one union. A wide product wastes work on pairs that nobody asked for, a narrow one gathers rows more
# often and has more overhead: that of launches on a GPU, so wider there.
BLOCK_ROWS = {"cpu": 32, "cuda": 128}
# Head rows are gathered for no more columns of a union product at a time.
PART_COLUMNS = 8192

# What a union product costs, in units of one pair computed alone (a dot product that is bound by memory): per cell of
# the product, and per head row that is gathered, or read in place. Measured on one core with AVX-512, float32; see
# benchmarks/scorer_crossover.py.
CELL_COST = 1 / 32
GATHER_COST = 1.5
READ_COST = 1.0


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
        union: `[U]` int64, sorted distinct candidates of the shard.
        blocks: cover all pairs, each once.
        num_ids: ids of the shard.
        widest: pairs of the row that has most.
        host_rows, host_pair_rows, host_pair_ids: `rows`, `pair_rows` and `pair_ids` on the host.
        shifts: of the pairs' logits; `None` where the sampler shifted none.
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
    union: torch.Tensor
    blocks: tuple[Block, ...]
    num_ids: int
    widest: int
    host_rows: np.ndarray
    host_pair_rows: np.ndarray
    host_pair_ids: np.ndarray
    shifts: PairShifts | None = None

    @property
    def num_pairs(self) -> int:
        return len(self.host_pair_ids)

    @property
    def pair_tokens(self) -> np.ndarray:
        """`[P]` int64 on the host, the token of each pair."""
        return self.host_rows[self.host_pair_rows]

    def shifted(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        """`[P]` logits as the sampler had them, from those of the model; both divided by the temperature."""
        return logits if self.shifts is None else self.shifts(logits, temperature)

    @functools.cached_property
    def tile_pairs(self) -> TilePairs:
        """The pairs by tiles of a projection on the whole vocabulary."""
        pairs = TilePairs.build(self.pair_tokens, self.host_pair_ids, len(self.sizes), self.num_ids)
        return to_device(pairs, self.rows.device)


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
    owned, lone_rows = sizes, np.flatnonzero(sizes == 1)
    lone_ids = ids[offsets[lone_rows]].astype(np.int64) - start
    if len(ids) and (ids.min() < start or ids.max() >= stop):
        inside = (ids >= start) & (ids < stop)
        owned = np.bincount(np.repeat(np.arange(len(sizes)), sizes)[inside], minlength=len(sizes))
        ids, offsets = ids[inside], np.append(0, owned.cumsum())
        lone_here = (lone_ids >= 0) & (lone_ids < stop - start)
        lone_rows, lone_ids = lone_rows[lone_here], lone_ids[lone_here]
    row_sizes = owned[rows]
    row_offsets = np.append(0, row_sizes.cumsum())
    pair_rows = np.repeat(np.arange(len(rows)), row_sizes)
    step = BLOCK_ROWS[device.type]
    first_wide = first_wide_row(row_offsets, stop - start, step)
    wide = [ids[slice(*offsets[row : row + 2])] - start for row in rows[first_wide:].tolist()]
    narrow = np.ones(len(sizes), dtype=bool)
    narrow[rows[first_wide:]] = False
    if wide:
        ids = ids[np.repeat(narrow, owned)]
    place = np.full(len(sizes), -1, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    # One number for each pair, so that one sort of integers brings them into order. Places of single ones are -1.
    bits = max(stop - start - 1, 1).bit_length()
    keys = np.repeat(place[narrow] << bits, owned[narrow]) | (ids.astype(np.int64) - start)
    keys = np.sort(keys)[len(lone_rows) :]
    narrow_ids = keys & ((1 << bits) - 1)
    _check_unique(keys, bits, start, rows)
    try:
        of_wide = list(wide_blocks(wide, stop - start, step))
    except RepeatedIdError as error:
        raise _repeated(rows[first_wide + error.row], error.id + start) from None
    used = np.zeros(stop - start, dtype=bool)
    for columns in (narrow_ids, *(block.columns for block in of_wide)):
        used[slice(None) if columns is None else columns] = True
    union, place_of = np.flatnonzero(used), np.cumsum(used) - 1
    pairs = np.concatenate([narrow_ids, *(block.ids for block in of_wide)]), pair_rows, row_offsets
    blocks = list(_narrow_blocks(rows[:first_wide], *pairs, place_of[narrow_ids], union, kernel, step))
    for first, block in zip(range(first_wide, len(rows), step), of_wide, strict=True):
        last = min(first + step, len(rows))
        run = slice(*row_offsets[[first, last]].tolist())
        width, cost = stop - start, READ_COST
        if block.columns is not None:
            width, cost = len(block.columns), GATHER_COST
        if kernel != "union" and len(block.ids) <= width * ((last - first) * CELL_COST + cost):
            of_rows = rows[first:last], row_offsets[first : last + 1], pair_rows[run] - first
            blocks.append(_sparse_block(*of_rows, block.ids, place_of[block.ids], union, kernel))
            continue
        parts = _whole(stop - start) if block.columns is None else _parts(block.columns)
        places_of = parts if block.columns is None else _parts(place_of[block.columns])
        blocks.append(UnionBlock(_tensor(rows[first:last]), parts, places_of, run, _tensor(block.cells)))
    plan = CandidatePlan(
        rows=_tensor(rows),
        pair_rows=_tensor(pair_rows),
        pair_ids=_tensor(pairs[0]),
        row_offsets=_tensor(row_offsets),
        empty_rows=_tensor(np.flatnonzero(sizes == 0)),
        sizes=_tensor(sizes),
        owned=_tensor(owned),
        lone_rows=_tensor(lone_rows),
        lone_ids=_tensor(lone_ids),
        union=_tensor(union),
        blocks=tuple(blocks),
        num_ids=stop - start,
        widest=int(row_sizes.max(initial=0)),
        host_rows=rows,
        host_pair_rows=pair_rows,
        host_pair_ids=pairs[0],
    )
    return to_device(plan, device)


def _in_order(keys: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 `keys` of `bits` bits sorted, and the place that each had before; equal keys keep their order.

    Key and place are sorted as one integer where they fit into one: that is much faster than `np.argsort`.
    """
    place_bits = len(keys).bit_length()
    if bits + place_bits > 62:
        order = np.argsort(keys, kind="stable")
        return keys[order], order
    both = (keys << place_bits) | np.arange(len(keys))
    both.sort()
    return both >> place_bits, both & ((1 << place_bits) - 1)


def _firsts(ordered: np.ndarray) -> np.ndarray:
    """Bool, where each number of a sorted array occurs first."""
    first = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return first


def _narrow_blocks(
    rows: np.ndarray,
    pair_ids: np.ndarray,
    pair_rows: np.ndarray,
    row_offsets: np.ndarray,
    places: np.ndarray,
    union: np.ndarray,
    kernel: str,
    step: int,
) -> Iterator[Block]:
    """Blocks of the first rows of a plan.

    Args:
        rows: their tokens.
        pair_ids, pair_rows, row_offsets: of the whole plan.
        places: `[p]`, places in the union of these rows' pairs.
    """

    def sparse(first: int, last: int) -> Block:
        pairs = slice(int(row_offsets[first]), int(row_offsets[last]))
        of_rows = rows[first:last], row_offsets[first : last + 1], pair_rows[pairs] - first
        return _sparse_block(*of_rows, pair_ids[pairs], places[pairs], union, kernel)

    starts = np.arange(0, len(rows), step)
    stops = np.minimum(starts + step, len(rows))
    # Distinct columns of each block, and the column of each pair in its own block, for all blocks at once.
    pair_offsets = row_offsets[np.append(starts, len(rows))]
    pairs_of = np.diff(pair_offsets)
    bits = len(union).bit_length()
    block_bits = np.arange(len(starts)) << bits
    ordered, order = _in_order(np.repeat(block_bits, pairs_of) | places, bits + len(starts).bit_length())
    first_of = _firsts(ordered)
    firsts = ordered[first_of]
    columns = firsts & ((1 << bits) - 1)
    num_columns = np.bincount(firsts >> bits, minlength=len(starts))
    column_offsets = np.append(0, num_columns.cumsum())
    column = np.empty_like(order)
    column[order] = first_of.cumsum() - 1
    column -= np.repeat(column_offsets[:-1], pairs_of)
    cheaper = pairs_of > num_columns * ((stops - starts) * CELL_COST + GATHER_COST)
    waiting = 0  # first row that no block covers yet
    for b in range(len(starts)) if kernel == "union" else np.flatnonzero(cheaper).tolist():
        if waiting < starts[b]:
            yield sparse(waiting, int(starts[b]))
        pairs = slice(*pair_offsets[b : b + 2].tolist())
        of_block = columns[slice(*column_offsets[b : b + 2].tolist())]
        cells = (pair_rows[pairs] - starts[b]) * len(of_block) + column[pairs]
        tokens = _tensor(rows[starts[b] : stops[b]])
        yield UnionBlock(tokens, _parts(union[of_block]), _parts(of_block), pairs, _tensor(cells))
        waiting = int(stops[b])
    if waiting < len(rows):
        yield sparse(waiting, len(rows))


def _parts(columns: np.ndarray) -> tuple[Columns, ...]:
    return _tensor(columns).split(PART_COLUMNS)


def _whole(num_ids: int) -> tuple[Columns, ...]:
    return tuple(slice(first, min(first + PART_COLUMNS, num_ids)) for first in range(0, num_ids, PART_COLUMNS))


def _sparse_block(
    tokens: np.ndarray,
    offsets: np.ndarray,
    pair_rows: np.ndarray,
    pair_ids: np.ndarray,
    places: np.ndarray,
    union: np.ndarray,
    kernel: str,
) -> Block:
    in_order, by_id = _in_order(places, len(union).bit_length())
    starts = np.flatnonzero(_firsts(in_order))
    columns, id_offsets = in_order[starts], np.append(starts, len(places))
    pairs = slice(int(offsets[0]), int(offsets[-1]))
    shared = {
        "tokens": _tensor(tokens),
        "row_offsets": _tensor(offsets - offsets[0]),
        "pair_ids": _tensor(pair_ids),
        "ids": _tensor(union[columns]),
        "places": _tensor(columns),
        "by_id": _tensor(by_id),
    }
    if kernel == "sparse":
        return SparseBlock(**shared, pairs=pairs, id_offsets=id_offsets, rows_by_id=_tensor(pair_rows[by_id]))
    from .kernels_triton import TritonBlock

    return TritonBlock(
        **shared,
        pairs=pairs,
        id_offsets=_tensor(id_offsets),
        pair_tokens=_tensor(tokens[pair_rows]),
        tokens_by_id=_tensor(tokens[pair_rows[by_id]]),
        in_order=_tensor(np.arange(len(places))),
    )


def _check_unique(keys: np.ndarray, bits: int, start: int, rows: np.ndarray) -> None:
    repeated = keys[1:][keys[1:] == keys[:-1]]
    if len(repeated):
        tokens = rows[repeated >> bits]
        first = np.argmin(tokens)
        raise _repeated(tokens[first], (repeated[first] & ((1 << bits) - 1)) + start)


def _repeated(row: int, repeated: int) -> ValueError:
    return ValueError(f"Support row {row} holds id {repeated} more than once.")


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))


def to_device(item: Planned, device: torch.device | str) -> Planned:
    """`item` with all its int64 tensors on the device, sent by one copy that nothing waits for.

    Args:
        item: a host tensor, or a dataclass or tuple that holds some, at any depth.
    """
    if torch.device(device).type == "cpu" or not (tensors := list(_tensors_of(item))):
        return item
    packed = torch.cat([tensor.flatten() for tensor in tensors])
    if torch.device(device).type == "cuda":
        packed = packed.pin_memory()
    parts = packed.to(device, non_blocking=True).split([tensor.numel() for tensor in tensors])
    return _with_tensors(item, iter([part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]))


def _tensors_of(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    for part in _parts_of(item):
        yield from _tensors_of(part)


def _with_tensors(item: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        return next(tensors)
    if isinstance(item, tuple):
        return tuple(_with_tensors(part, tensors) for part in item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        changed = {f.name: _with_tensors(getattr(item, f.name), tensors) for f in dataclasses.fields(item)}
        return dataclasses.replace(item, **changed)
    return item


def _parts_of(item: Any) -> list[Any]:
    if isinstance(item, tuple):
        return list(item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name) for field in dataclasses.fields(item)]
    return []
