"""Packed rows: the same ids behind the wire, in few bytes, and no memory for what is only claimed."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_support_replay.wire.arrays import MessageError
from trl_support_replay.wire.packed_ids import PackedIds, pack_ids, unpack_ids


def flat(rows):
    ids = np.array([i for row in rows for i in sorted(row)], dtype=np.int32)
    return ids, np.array([len(row) for row in rows], dtype=np.int64)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_rows_survive(data):
    ids = st.integers(0, data.draw(st.sampled_from([40, 600, 70_000, 2**31 - 1])))
    rows = data.draw(st.lists(st.sets(ids), max_size=8))
    ids, sizes = flat(rows)
    unpacked = unpack_ids(pack_ids(ids, sizes), sizes)
    assert unpacked.dtype == np.int32 and unpacked.tolist() == ids.tolist()


def bytes_of(packed):
    return packed.distances.nbytes + 2 * len(packed.far) + packed.bitmaps.nbytes


def test_long_rows_take_about_a_byte_per_id():
    """Sizes as those of a language model's supports at top_p=0.95: a mean near 500, a median near 150."""
    rng = np.random.default_rng(0)
    sizes = np.minimum(9201, np.exp(rng.normal(5.05, 1.55, 400)).astype(int))
    rows = [rng.choice(49_152, size, replace=False).tolist() for size in sizes]
    ids, sizes = flat(rows)
    packed = pack_ids(ids, sizes)
    assert len(packed.bitmaps) > 0 and bytes_of(packed) / len(ids) < 1.25
    assert unpack_ids(packed, sizes).tolist() == ids.tolist()


def test_a_dense_row_is_a_bitmap():
    ids, sizes = flat([range(0, 8000, 2)])
    packed = pack_ids(ids, sizes)
    assert len(packed.distances) == 0 and len(packed.bitmaps) == 1000


EXAMPLE = [{3, 300, 301}, set(), set(range(0, 4000, 3)), {9}]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"span": -1}, "span=-1"),
        ({"span": 2**31 + 1}, "span="),
        ({"span": 300}, "bytes of bitmaps"),
        ({"distances": np.zeros(3, np.uint8)}, "3 distances"),
        ({"far": np.zeros(0, np.uint8)}, "1 are too far for a byte, where sizes and list have 4 and 0"),
        ({"far": np.array([254], np.uint8)}, "distance 254 is in the list of those that no byte holds"),
        ({"far": np.array([-7], np.int32)}, "distance -7"),
        ({"far": np.array([5000], np.uint16)}, "is not below span="),
        ({"bitmaps": np.zeros(500, np.uint8)}, "does not hold as many ids"),
    ],
)
def test_what_does_not_fit_the_sizes_is_refused(changes, says):
    ids, sizes = flat(EXAMPLE)
    packed = pack_ids(ids, sizes)
    assert len(packed.far) == 1 and len(packed.bitmaps) == 500
    with pytest.raises(MessageError, match=says):
        unpack_ids(replace(packed, **changes), sizes)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_damage_is_an_error_or_other_rising_rows(data):
    ids, sizes = flat(EXAMPLE)
    packed = pack_ids(ids, sizes)
    parts = {name: bytearray(getattr(packed, name).tobytes()) for name in ("distances", "far", "bitmaps")}
    name = data.draw(st.sampled_from([name for name, part in parts.items() if part]))
    place = data.draw(st.integers(0, len(parts[name]) - 1))
    parts[name][place] ^= 1 << data.draw(st.integers(0, 7))
    arrays = {key: np.frombuffer(bytes(part), getattr(packed, key).dtype) for key, part in parts.items()}
    try:
        unpacked = unpack_ids(PackedIds(packed.span, **arrays), sizes)
    except MessageError:
        return
    for row in np.split(unpacked, np.cumsum(sizes)[:-1]):
        assert (np.diff(row) > 0).all() and (row >= 0).all() and (row < packed.span).all()


def test_claimed_sizes_take_no_memory():
    nothing = PackedIds(2**31, *[np.zeros(0, np.uint8)] * 3)
    tracemalloc.start()
    try:
        with pytest.raises(MessageError):
            unpack_ids(nothing, np.full(10, 2**31 - 1))
        with pytest.raises(MessageError):
            unpack_ids(replace(nothing, span=8), np.full(10, 2**31 - 1))
        _, used = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 100_000
