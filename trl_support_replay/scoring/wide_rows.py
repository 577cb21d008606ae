"""Plans blocks of wide supports by marking their pairs in a table, which takes less time than to sort them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

# A block is planned here if its mean support holds at least this many ids and this part of the vocabulary.
LEAST_IDS = 256
LEAST_PART = 1 / 64
# Where the union of a block is at least this part of the vocabulary, its product is made on all of it: that gathers no
# rows of the head.
WHOLE_PART = 1 / 2


@dataclass(frozen=True)
class WideBlock:
    """The pairs of some consecutive rows.

    Attributes:
        ids: `[p]` int64, row after row, rising within each.
        columns: `[U]` int64, sorted distinct ids; `None` where the columns are the whole vocabulary.
        cells: `[p]` int64, each pair's place in the flattened `[n, U]` table of rows and columns.
    """

    ids: np.ndarray
    columns: np.ndarray | None
    cells: np.ndarray


def first_wide_row(row_offsets: np.ndarray, num_ids: int, step: int) -> int:
    """The row from which on all blocks of `step` rows are planned here.

    Args:
        row_offsets: `[R + 1]` int64, of rows sorted by size.
        num_ids: size of the vocabulary shard.
    """
    bounds = np.append(np.arange(0, len(row_offsets) - 1, step), len(row_offsets) - 1)
    narrow = np.diff(row_offsets[bounds]) < np.diff(bounds) * max(LEAST_IDS, num_ids * LEAST_PART)
    return int(bounds[np.flatnonzero(narrow)[-1] + 1]) if narrow.any() else 0


def wide_blocks(rows: list[np.ndarray], num_ids: int, step: int) -> Iterator[WideBlock]:
    """The rows' pairs, in blocks of `step` rows.

    Args:
        rows: ids of each row, integers below `num_ids` in any order.

    Raises:
        RepeatedIdError: a row that holds an id twice.
    """
    for first in range(0, len(rows), step):
        of_block = rows[first : first + step]
        table = np.zeros((len(of_block), num_ids), dtype=bool)
        for marks, ids in zip(table, of_block, strict=True):
            marks[ids] = True
        cells = np.flatnonzero(table)
        sizes = [len(ids) for ids in of_block]
        if len(cells) != sum(sizes):
            raise _repeated(table, of_block, first)
        ids = cells - np.repeat(np.arange(len(of_block)) * num_ids, sizes)
        used = table.any(axis=0)
        columns = np.flatnonzero(used)
        if len(columns) >= WHOLE_PART * num_ids:
            yield WideBlock(ids, None, cells)
        else:
            column_of = np.cumsum(used) - 1
            starts = np.repeat(np.arange(len(of_block)) * len(columns), sizes)
            yield WideBlock(ids, columns, starts + column_of[ids])


class RepeatedIdError(ValueError):
    """An id that a row holds twice.

    Attributes:
        row, id: which.
    """

    def __init__(self, row: int, repeated: int):
        super().__init__(f"Row {row} holds id {repeated} more than once.")
        self.row, self.id = row, repeated


def _repeated(table: np.ndarray, rows: list[np.ndarray], first: int) -> RepeatedIdError:
    row = next(i for i, ids in enumerate(rows) if len(ids) != table[i].sum())
    ids, counts = np.unique(rows[row], return_counts=True)
    return RepeatedIdError(first + row, int(ids[counts > 1][0]))
