import copy
import pickle

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_support_replay.traces import SupportError, SupportRows

VOCAB = 12
ragged = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=5, unique=True), max_size=12)


def indices_of(rows):
    return st.lists(st.integers(-len(rows), len(rows) - 1), max_size=15) if rows else st.just([])


@given(ragged)
def test_is_the_list_it_was_made_from(rows):
    support = SupportRows.from_ragged(rows)
    assert support.to_lists() == rows
    assert len(support) == len(rows)
    assert support.sizes.tolist() == [len(row) for row in rows]
    assert support.nnz == sum(map(len, rows))
    assert support.token_ids.dtype == np.int32 and support.offsets.dtype == np.int64
    assert support.nbytes == 4 * support.nnz + 8 * (len(rows) + 1)
    assert SupportRows.from_ragged([np.array(row) for row in rows]) == support
    assert SupportRows(support.token_ids, support.offsets) == support
    assert [support[i].tolist() for i in range(len(support))] == rows
    support.validate(vocab_size=VOCAB)


@given(ragged, st.data())
def test_slice_selects_as_lists_do(rows, data):
    index = data.draw(st.slices(len(rows)))
    assert SupportRows.from_ragged(rows)[index].to_lists() == rows[index]


@given(ragged, st.data())
def test_integers_and_masks_select_as_lists_do(rows, data):
    support = SupportRows.from_ragged(rows)
    index = data.draw(indices_of(rows))
    expected = [rows[i] for i in index]
    for form in (index, np.array(index, dtype=np.int64), torch.tensor(index, dtype=torch.int64)):
        assert support[form].to_lists() == expected
    mask = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    kept = [row for row, keep in zip(rows, mask, strict=True) if keep]
    for form in (np.array(mask, dtype=bool), torch.tensor(mask, dtype=torch.bool)):
        assert support[form].to_lists() == kept
    if rows:
        assert support[mask].to_lists() == kept
        i = data.draw(st.integers(-len(rows), len(rows) - 1))
        assert support[i].tolist() == support[np.int64(i)].tolist() == rows[i]


@given(ragged, st.data())
def test_take_gives_empty_rows_for_missing(rows, data):
    index = data.draw(st.lists(st.integers(-1, len(rows) - 1), max_size=15))
    taken = SupportRows.from_ragged(rows).take(index)
    assert taken.to_lists() == [[] if i == -1 else rows[i] for i in index]


@given(st.lists(ragged, max_size=4))
def test_concatenate_joins_and_slices_split(parts):
    whole = SupportRows.concatenate([SupportRows.from_ragged(part) for part in parts])
    assert whole.to_lists() == [row for part in parts for row in part]
    start = 0
    for part in parts:
        assert whole[start : start + len(part)].to_lists() == part
        start += len(part)
    assert [run.to_lists() for run in whole.split([len(part) for part in parts])] == parts


@given(ragged, st.data())
def test_arrow_both_ways(rows, data):
    support = SupportRows.from_ragged(rows)
    assert support.to_arrow().to_pylist() == rows
    index = data.draw(st.slices(len(rows)).filter(lambda s: s.step in (None, 1)))
    start, stop, _ = index.indices(len(rows))
    for kind in (pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint16())):
        column = pa.array(rows, type=kind)
        assert SupportRows.from_arrow(column) == support
        assert SupportRows.from_arrow(column.slice(start, max(stop - start, 0))).to_lists() == rows[index]
        assert SupportRows.from_arrow(pa.chunked_array([column[:2], column[2:]], type=kind)) == support
        assert SupportRows.from_arrow(pa.chunked_array([], type=kind)).to_lists() == []


def test_arrow_shares_memory_both_ways():
    support = SupportRows.from_ragged([[3, 4], [], [5]])
    column = support.to_arrow()
    again = SupportRows.from_arrow(column)
    assert np.shares_memory(again.token_ids, support.token_ids)
    assert np.shares_memory(again.offsets, support.offsets)
    assert np.shares_memory(SupportRows.from_arrow(column.slice(1)).token_ids, support.token_ids)
    small = pa.array([[3, 4], [5]], type=pa.list_(pa.int32()))
    assert np.shares_memory(SupportRows.from_arrow(small).token_ids, small.values.to_numpy())


@given(ragged)
def test_dense_both_ways(rows):
    width = max(map(len, rows), default=0)
    for pad in (-1, VOCAB):
        dense = np.array([row + [pad] * (width - len(row)) for row in rows], dtype=np.int64).reshape(len(rows), width)
        assert SupportRows.from_dense(dense, pad=pad).to_lists() == rows


@given(ragged, st.data())
def test_contains_looks_in_each_row(rows, data):
    sampled = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=len(rows), max_size=len(rows)))
    support = SupportRows.from_ragged(rows)
    held = [token in row for token, row in zip(sampled, rows, strict=True)]
    assert support.contains(sampled).tolist() == held
    wrong = [t for t, row in enumerate(rows) if row and not held[t]]
    if not wrong:
        support.validate(sampled_ids=sampled)
        return
    with pytest.raises(SupportError, match=f"^batch 3: row {wrong[0]} has .* sampled id {sampled[wrong[0]]} is not"):
        support.validate(sampled_ids=sampled, where="batch 3")


@given(ragged.filter(any), st.data())
def test_a_fault_is_found_in_its_row(rows, data):
    row = data.draw(st.sampled_from([t for t, ids in enumerate(rows) if ids]))
    place = data.draw(st.integers(0, len(rows[row])))
    for bad, message in (
        (VOCAB, f"row {row}: id {VOCAB} is outside a vocabulary of {VOCAB}"),
        (-1, f"row {row}: id -1 is outside"),
        (rows[row][0], f"row {row}: id {rows[row][0]} appears more than once"),
    ):
        broken = [*rows[:row], [*rows[row][:place], bad, *rows[row][place:]], *rows[row + 1 :]]
        with pytest.raises(SupportError, match=message):
            SupportRows.from_ragged(broken).validate(vocab_size=VOCAB)


def test_a_negative_id_is_a_fault_without_a_vocabulary_too():
    with pytest.raises(SupportError, match="row 1: id -7 is negative"):
        SupportRows.from_ragged([[1], [2, -7]]).validate()


@given(ragged)
def test_copies_are_equal_and_a_slice_pickles_only_itself(rows):
    support = SupportRows.from_ragged(rows)
    for again in (pickle.loads(pickle.dumps(support)), copy.copy(support), copy.deepcopy(support)):
        assert again == support
    assert (support == SupportRows.from_ragged([*rows, []])) is False
    assert support != rows


def test_a_pickled_slice_leaves_the_rest_behind():
    support = SupportRows.from_ragged([list(range(1000))] * 100)
    assert len(pickle.dumps(support[:1])) < 10_000


def test_cannot_be_written_to_and_leaves_its_sources_writable():
    ids = np.array([1, 2], dtype=np.int32)
    support = SupportRows(ids, [0, 1, 2])
    with pytest.raises(ValueError, match="read-only"):
        support.token_ids[0] = 5
    for array in (support[0], support[1:].token_ids, support[1:].offsets):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5
    assert ids.flags.writeable and np.shares_memory(ids, support.token_ids)


@pytest.mark.parametrize(
    ("token_ids", "offsets", "message"),
    [
        ([1, 2], [0, 2, 1, 2], "fall from 2 to 1 at row 1"),
        ([1, 2], [1, 2], "start with 1"),
        ([1, 2], [], "start with nothing"),
        ([1, 2], [0, 1], "end at 1, but there are 2"),
        ([1, 2], [0, 3], "end at 3, but there are 2"),
        ([1.0, 2.0], [0, 2], "float64"),
        ([1, 2], [0.0, 2.0], "float64"),
        ([[1, 2]], [0, 2], "shape"),
        ([1, 2**31], [0, 2], r"token_ids\[1\] = 2147483648 does not fit"),
    ],
)
def test_refuses_arrays_that_are_not_rows(token_ids, offsets, message):
    with pytest.raises(SupportError, match=message):
        SupportRows(np.asarray(token_ids), np.asarray(offsets))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([[1], None, [2]]), "1 of 3 rows are null"),
        (pa.array([[1, None]]), "1 of 2 token ids are null"),
        (pa.array([[1.5]]), "not lists of integers"),
        (pa.array([1, 2]), "not lists of integers"),
        (pa.chunked_array([[1, 2]]), "not lists of integers"),
        (pa.array([[2**40]]), "does not fit an int32"),
    ],
)
def test_refuses_arrow_columns_that_are_not_rows(column, message):
    with pytest.raises(SupportError, match=message):
        SupportRows.from_arrow(column)


def test_refuses_padding_before_an_id():
    with pytest.raises(SupportError, match="Row 1 has id 4 to the right of padding"):
        SupportRows.from_dense([[1, -1, -1], [3, -1, 4]])


def test_refuses_to_select_what_is_not_there():
    support = SupportRows.from_ragged([[1], [2], [3]])
    for index in (3, -4, [0, 3], np.array([-4])):
        with pytest.raises(IndexError, match="outside 3 rows"):
            support[index]
    with pytest.raises(SupportError, match=r"mask of shape \(2,\) selects among 3 rows"):
        support[np.array([True, False])]
    with pytest.raises(TypeError, match="mask of 3 booleans"):
        support[True]
    with pytest.raises(SupportError, match="float64"):
        support[np.array([0.0, 1.0])]
    for index in ([3], [-2]):
        with pytest.raises(SupportError, match="outside 3 rows"):
            support.take(index)
    for sizes in ([2, 2], [2, -1]):
        with pytest.raises(SupportError, match="do not fit 3 rows"):
            support.split(sizes)
    with pytest.raises(SupportError, match="2 sampled ids for 3 rows"):
        support.contains([1, 2])
