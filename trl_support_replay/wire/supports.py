"""Supports in a message: sizes, and the ids beside the sampled token of each row."""

from __future__ import annotations

import msgspec
import numpy as np

from ..traces.support import SupportRows
from .arrays import Array, MessageError, ends_of, read, smallest
from .packed_ids import PackedIds, pack_ids, unpack_ids


class Ids(msgspec.Struct):
    """Ids of many rows, as they are (`plain`) or packed; the other fields are those of `PackedIds`."""

    plain: Array | None = None
    span: int = 0
    distances: Array | None = None
    far: Array | None = None
    bitmaps: Array | None = None


def pack_supports(rows: SupportRows, token_ids: np.ndarray) -> tuple[Array, Ids]:
    """Sizes and ids of the supports of the tokens `[T]`. Sizes that are all alike are sent once."""
    sizes = rows.sizes
    alike = len(sizes) > 1 and bool((sizes == sizes[0]).all())
    return Array.of(smallest(sizes[:1] if alike else sizes)), _packed(_others(rows, token_ids), sizes - 1)


def unpack_supports(sizes: Array | None, ids: Ids | None, token_ids: np.ndarray) -> SupportRows:
    """The supports of the tokens `[T]`, each row ascending.

    Raises:
        MessageError: what is no support of each token, among them a row that does not hold its token once.
    """
    counts = read(sizes, "support_sizes").astype(np.int64)
    if len(counts) == 1 < len(token_ids):
        counts = np.repeat(counts, len(token_ids))
    if len(counts) != len(token_ids):
        raise MessageError(f"support_sizes has {len(counts)} entries for {len(token_ids)} rows.")
    if (counts < 1).any():
        raise MessageError(f"support_sizes[{int(np.argmin(counts))}]={counts.min()}; a row holds its sampled token.")
    if ids is None:
        raise MessageError("support_ids is missing.")
    others = _unpacked(ids, counts - 1)
    drawn = np.repeat(token_ids, counts - 1)
    if (others == drawn).any():
        raise MessageError("support_ids: a row holds its sampled token twice.")
    offsets = np.concatenate([[0], np.cumsum(counts)])
    # The sampled token goes behind those of its row that are less.
    less = np.concatenate([[0], np.cumsum(others < drawn)])
    firsts = offsets - np.arange(len(offsets))
    places = offsets[:-1] + less[firsts[1:]] - less[firsts[:-1]]
    merged, is_other = np.empty(offsets[-1], dtype=np.int32), np.ones(offsets[-1], dtype=bool)
    is_other[places] = False
    merged[places], merged[is_other] = token_ids, others
    return SupportRows(merged, offsets)


def _others(rows: SupportRows, token_ids: np.ndarray) -> np.ndarray:
    """`[nnz - T]` ids of the `T` rows without the tokens' own, ascending in each row."""
    rows.validate(sampled_ids=token_ids)
    ids, sizes = rows.token_ids, rows.sizes
    others = ids[ids != np.repeat(token_ids, sizes)]
    if rows.rises():
        return others
    row = np.repeat(np.arange(len(rows), dtype=np.int64), sizes - 1)
    return (np.sort(row << 32 | others) & 0xFFFFFFFF).astype(np.int32)


def _packed(ids: np.ndarray, sizes: np.ndarray) -> Ids:
    plain = smallest(ids)
    # A distance takes a byte or, from 255 on, three; an id takes the bytes of its type.
    if plain.itemsize == 1 or len(ids) * 255 < (int(ids.max(initial=0)) + 1) * len(sizes):
        return Ids(plain=Array.of(plain))
    packed = pack_ids(ids, sizes)
    return Ids(
        span=packed.span,
        distances=Array.of(packed.distances),
        far=Array.of(smallest(packed.far)),
        bitmaps=Array.of(packed.bitmaps),
    )


def _unpacked(ids: Ids, sizes: np.ndarray) -> np.ndarray:
    """`[nnz]` non-negative integers, rising in each row of `sizes`."""
    if ids.plain is None:
        arrays = (read(getattr(ids, name), f"support_ids.{name}") for name in ("distances", "far", "bitmaps"))
        return unpack_ids(PackedIds(ids.span, *arrays), sizes)
    plain = read(ids.plain, "support_ids")
    ends = ends_of(sizes, len(sizes), len(plain), "support_sizes", "support_ids")
    if not SupportRows(plain, ends).rises() or plain.min(initial=0) < 0:
        raise MessageError("support_ids: the ids of a row do not ascend from 0.")
    return plain
