"""`SupportRows`: the sampling supports of a run of tokens, one row of candidate ids per token, packed row after row."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

_INT32 = np.iinfo(np.int32)


class SupportError(ValueError):
    """Supports that no sampler could have produced, or that do not fit the tokens or the vocabulary."""


class SupportRows:
    """Sampling supports of `T` tokens in compressed sparse rows.

    Row `t` is `token_ids[offsets[t]:offsets[t + 1]]`: the ids that token `t` could have been drawn from. A token that
    was not sampled (an observation) has an empty row. Rows hold the engine's ids as it gave them; the order of ids
    within a row carries no meaning, though `==` compares it. The ids of a slice are a view of the ids it was cut from.

    Args:
        token_ids: `[nnz]` integers. Stored as int32, without a copy where they are int32 already.
        offsets: `[T + 1]` integers from 0 to `nnz`, never falling. Stored as int64, likewise.

    Attributes:
        token_ids: `[nnz]` int32, read-only.
        offsets: `[T + 1]` int64, read-only.

    Raises:
        SupportError: arrays that are not one-dimensional integers, ids beyond int32, or offsets that do not start at 0,
            fall somewhere, or do not end at `nnz`. The ids themselves are judged by `validate`.
    """

    __slots__ = ("token_ids", "offsets")

    token_ids: np.ndarray
    offsets: np.ndarray

    def __init__(self, token_ids: Any, offsets: Any) -> None:
        ids = _integers(token_ids, "token_ids")
        if ids.dtype != np.int32:
            outside = (ids < _INT32.min) | (ids > _INT32.max)
            if outside.any():
                raise SupportError(f"token_ids[{int(np.argmax(outside))}] = {ids[outside][0]} does not fit an int32.")
            ids = ids.astype(np.int32)
        ends = _integers(offsets, "offsets").astype(np.int64, copy=False)
        if len(ends) == 0 or ends[0] != 0:
            raise SupportError(f"offsets start with {ends[0] if len(ends) else 'nothing'}, not with 0.")
        falls = ends[1:] < ends[:-1]
        if falls.any():
            row = int(np.argmax(falls))
            raise SupportError(f"offsets fall from {ends[row]} to {ends[row + 1]} at row {row}.")
        if ends[-1] != len(ids):
            raise SupportError(f"offsets end at {ends[-1]}, but there are {len(ids)} token ids.")
        self._set(ids, ends)

    def _set(self, token_ids: np.ndarray, offsets: np.ndarray) -> None:
        # Views, so that the caller's own arrays stay writable.
        self.token_ids = token_ids.view()
        self.offsets = offsets.view()
        self.token_ids.flags.writeable = False
        self.offsets.flags.writeable = False

    @classmethod
    def _trusted(cls, token_ids: np.ndarray, offsets: np.ndarray) -> SupportRows:
        new = object.__new__(cls)
        new._set(token_ids, offsets)
        return new

    @classmethod
    def empty(cls, num_rows: int) -> SupportRows:
        """`num_rows` empty rows."""
        return cls._trusted(np.zeros(0, dtype=np.int32), np.zeros(num_rows + 1, dtype=np.int64))

    @classmethod
    def from_ragged(cls, rows: Iterable[Sequence[int] | np.ndarray]) -> SupportRows:
        """One row for each list or array of ids."""
        rows = list(rows)
        sizes = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        if rows and all(isinstance(row, np.ndarray) for row in rows):
            # An empty array is float64 unless its maker said otherwise.
            token_ids: Any = np.concatenate([row if len(row) else np.zeros(0, dtype=np.int32) for row in rows])
        else:
            token_ids = list(itertools.chain.from_iterable(rows))
        return cls(token_ids, _offsets(sizes))

    @classmethod
    def from_dense(cls, array: Any, pad: int = -1) -> SupportRows:
        """Rows of a padded matrix.

        Args:
            array: `[T, K]` integers, each row padded on the right.
            pad: the id that means "nothing here".

        Raises:
            SupportError: an id to the right of padding, which is what a shifted or overwritten row looks like.
        """
        array = np.asarray(array)
        if array.ndim != 2:
            raise SupportError(f"Shape {array.shape} is not [tokens, width].")
        held = array != pad
        gaps = held[:, 1:] & ~held[:, :-1]
        if gaps.any():
            row, column = np.argwhere(gaps)[0]
            raise SupportError(f"Row {row} has id {array[row, column + 1]} to the right of padding ({pad}).")
        return cls(array[held], _offsets(held.sum(axis=1)))

    @classmethod
    def from_arrow(cls, array: pa.ListArray | pa.LargeListArray | pa.ChunkedArray) -> SupportRows:
        """Rows of an Arrow list column; a slice of a column gives that slice's rows.

        int32 values are used in place, and so are the offsets of a large list that starts at the beginning of its
        values. A column of several chunks is concatenated.

        Raises:
            SupportError: not lists of integers, a null row or a null id, or an id beyond int32.
        """
        import pyarrow as pa

        if isinstance(array, pa.ChunkedArray):
            if not _is_integer_list(array.type):
                raise SupportError(f"An Arrow column of type {array.type} is not lists of integers.")
            return cls.concatenate([cls.from_arrow(chunk) for chunk in array.chunks])
        if not _is_integer_list(array.type):
            raise SupportError(f"An Arrow array of type {array.type} is not lists of integers.")
        if array.null_count:
            raise SupportError(f"{array.null_count} of {len(array)} rows are null; a row without support is empty.")
        offsets = array.offsets.to_numpy()
        first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
        values = array.values.slice(first, last - first)
        if values.null_count:
            raise SupportError(f"{values.null_count} of {len(values)} token ids are null.")
        if first:
            offsets = offsets - first
        return cls(values.to_numpy(), offsets if len(offsets) else [0])

    @classmethod
    def concatenate(cls, parts: Sequence[SupportRows]) -> SupportRows:
        """The rows of several parts, in order; no parts give no rows."""
        if not parts:
            return cls.empty(0)
        if len(parts) == 1:
            return parts[0]
        starts = np.cumsum([0, *(part.nnz for part in parts)])
        offsets = [part.offsets[1:] + start for part, start in zip(parts, starts[:-1], strict=True)]
        return cls._trusted(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([np.zeros(1, dtype=np.int64), *offsets]),
        )

    def to_arrow(self) -> pa.LargeListArray:
        """`T` lists of int32, sharing the memory of ids and offsets."""
        import pyarrow as pa

        return pa.LargeListArray.from_arrays(pa.array(self.offsets), pa.array(self.token_ids))

    def to_lists(self) -> list[list[int]]:
        """`T` lists of ids."""
        ids, ends = self.token_ids.tolist(), self.offsets.tolist()
        return [ids[start:end] for start, end in itertools.pairwise(ends)]

    @property
    def sizes(self) -> np.ndarray:
        """`[T]` int64, number of ids of each row."""
        return np.diff(self.offsets)

    @property
    def nnz(self) -> int:
        """Number of ids of all rows."""
        return len(self.token_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of ids and offsets."""
        return self.token_ids.nbytes + self.offsets.nbytes

    def take(self, indices: Any, missing: int = -1) -> SupportRows:
        """The rows at `indices` `[M]`, in that order.

        Args:
            indices: `[M]` integers from 0 to `T - 1`, or `missing`.
            missing: the index that gives an empty row, as an observation token has.

        Raises:
            SupportError: an index outside the rows, or indices that are no list of integers.
        """
        indices = _integers(indices, "Row indices").astype(np.int64, copy=False)
        absent = indices == missing
        outside = ~absent & ((indices < 0) | (indices >= len(self)))
        if outside.any():
            raise SupportError(f"Row index {indices[outside][0]} is outside {len(self)} rows.")
        if not absent.any():
            return self._gather(indices)
        # One row more, an empty one, for `missing` to point at.
        padded = self._trusted(self.token_ids, np.append(self.offsets, self.nnz))
        return padded._gather(np.where(absent, len(self), indices))

    def _gather(self, rows: np.ndarray) -> SupportRows:
        offsets = _offsets(self.offsets[rows + 1] - self.offsets[rows])
        # Rows that follow each other, as the tokens of a turn do, are copied as one.
        last = np.append(rows[1:] != rows[:-1] + 1, True)[: len(rows)]
        first = np.append(True, last[:-1])[: len(rows)]
        runs = zip(self.offsets[rows[first]].tolist(), self.offsets[rows[last] + 1].tolist(), strict=True)
        parts = [self.token_ids[start:stop] for start, stop in runs]
        return self._trusted(np.concatenate(parts) if parts else self.token_ids[:0], offsets)

    def split(self, sizes: Any) -> list[SupportRows]:
        """Consecutive runs of rows, such as the completions of a batch.

        Args:
            sizes: numbers of rows; what they leave over at the end is left out.

        Raises:
            SupportError: runs longer than the rows, a negative number, or sizes that are no list of integers.
        """
        bounds = _offsets(_integers(sizes, "sizes"))
        if (bounds[1:] < bounds[:-1]).any() or bounds[-1] > len(self):
            raise SupportError(f"Runs of {np.asarray(sizes).tolist()} rows do not fit {len(self)} rows.")
        rows, places = itertools.pairwise(bounds.tolist()), itertools.pairwise(self.offsets[bounds].tolist())
        token_ids, offsets = self.token_ids, self.offsets
        runs = []
        for (start, stop), (first, last) in zip(rows, places, strict=True):
            run = object.__new__(SupportRows)
            run.token_ids = token_ids[first:last]
            run.offsets = offsets[start : stop + 1] - first
            run.offsets.setflags(write=False)
            runs.append(run)
        return runs

    def contains(self, sampled_ids: Any) -> np.ndarray:
        """Bool `[T]`: does row `t` hold `sampled_ids[t]`? An empty row holds nothing.

        Args:
            sampled_ids: `[T]` integers.
        """
        sampled = _integers(sampled_ids, "sampled_ids")
        if len(sampled) != len(self):
            raise SupportError(f"{len(sampled)} sampled ids for {len(self)} rows.")
        row_of = np.repeat(np.arange(len(self)), self.sizes)  # [nnz]
        held = np.zeros(len(self), dtype=bool)
        held[row_of[self.token_ids == sampled[row_of]]] = True
        return held

    def validate(self, *, vocab_size: int | None = None, sampled_ids: Any = None, where: str = "") -> None:
        """Raise unless every row is one that a sampler can have drawn from.

        Args:
            vocab_size: rows of the language-model head. Ids may lie beyond the tokenizer's, never beyond the head's.
            sampled_ids: `[T]` integers; each non-empty row must hold its own.
            where: what to call these rows in the error.

        Raises:
            SupportError: a negative id or one not below `vocab_size`, an id twice in one row, or a sampled id missing.
        """
        prefix = f"{where}: " if where else ""
        ids = self.token_ids
        outside = ids < 0
        if vocab_size is not None:
            outside = outside | (ids >= vocab_size)
        if outside.any():
            place = int(np.argmax(outside))
            limit = "is negative" if vocab_size is None else f"is outside a vocabulary of {vocab_size}"
            raise SupportError(f"{prefix}row {self._row_of(place)}: id {ids[place]} {limit}.")
        if not self.rises():
            row_of = np.repeat(np.arange(len(self), dtype=np.int64), self.sizes)
            keys = np.sort((row_of << 32) | ids)  # ids are known to be non-negative
            twice = keys[1:] == keys[:-1]
            if twice.any():
                key = int(keys[np.argmax(twice)])
                raise SupportError(f"{prefix}row {key >> 32}: id {key & 0xFFFFFFFF} appears more than once.")
        if sampled_ids is not None:
            missing = ~self.contains(sampled_ids) & (self.sizes > 0)
            if missing.any():
                row = int(np.argmax(missing))
                raise SupportError(
                    f"{prefix}row {row} has {int(self.sizes[row])} ids, and the sampled id "
                    f"{int(np.asarray(sampled_ids)[row])} is not among them."
                )

    def rises(self) -> bool:
        """Whether the ids of each row rise, so that none is there twice."""
        rises = self.token_ids[1:] > self.token_ids[:-1]
        starts = self.offsets[1:-1]
        rises[starts[(starts > 0) & (starts < self.nnz)] - 1] = True  # the first id of a row
        return bool(rises.all())

    def _row_of(self, place: int) -> int:
        return int(np.searchsorted(self.offsets, place, side="right")) - 1

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int | np.integer) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | Sequence[bool] | np.ndarray) -> SupportRows: ...

    def __getitem__(self, index: Any) -> Any:
        """One row as a view, by integer; several by slice, integer array or list, or boolean mask of length `T`.

        Indices may be negative, as in NumPy.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return self._gather(np.arange(len(self))[index])
            return self.split([start, max(stop - start, 0)])[-1]
        if np.ndim(index) == 0:
            if isinstance(index, (bool, np.bool_)):
                raise TypeError(f"{index!r} selects no row: use a mask of {len(self)} booleans or an integer.")
            row = operator.index(index)
            if not -len(self) <= row < len(self):
                raise IndexError(f"Row {row} is outside {len(self)} rows.")
            row %= len(self)
            return self.token_ids[self.offsets[row] : self.offsets[row + 1]]
        index = np.asarray(index)
        if index.dtype == bool:
            if index.shape != (len(self),):
                raise SupportError(f"A mask of shape {index.shape} selects among {len(self)} rows.")
            return self._gather(np.flatnonzero(index))
        index = _integers(index, "Row indices").astype(np.int64, copy=False)
        outside = (index < -len(self)) | (index >= len(self))
        if outside.any():
            raise IndexError(f"Row {index[outside][0]} is outside {len(self)} rows.")
        return self._gather(np.where(index < 0, index + len(self), index))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SupportRows):
            return NotImplemented
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(self.token_ids, other.token_ids)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple:
        return SupportRows, (self.token_ids, self.offsets)

    def __repr__(self) -> str:
        return f"SupportRows(rows={len(self)}, nnz={self.nnz})"


def _integers(array: Any, name: str) -> np.ndarray:
    array = np.asarray(array)
    if array.size == 0 and array.ndim == 1:
        return array.astype(np.int32) if array.dtype.kind not in "iu" else array
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise SupportError(f"{name} of type {array.dtype} and shape {array.shape} are not a list of integers.")
    return array


def _offsets(sizes: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _is_integer_list(kind: Any) -> bool:
    import pyarrow.types as types

    return (types.is_list(kind) or types.is_large_list(kind)) and types.is_integer(kind.value_type)
