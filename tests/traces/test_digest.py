"""The checksum of a trace: the same through every format, another one for every change of what decides numbers."""

import json
import logging

import datasets
import numpy as np
import pyarrow as pa
import pytest

from tests.traces.test_columns import ORIGIN, make_trace
from trl_support_replay.traces import digest
from trl_support_replay.traces.columns import TraceSchemaError, table_to_traces, traces_to_table


def whole(num=6, routed=True):
    rng = np.random.default_rng(4)
    traces = []
    while len(traces) < num:
        trace = make_trace(rng, routed, {"reward": len(traces) / 3, "answer": "x"})
        if len(trace.completion_ids) > 2 and trace.supports.nnz:
            traces.append(trace)
    return traces_to_table(traces, **ORIGIN)


def through_json(dataset, folder):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in dataset.to_list()))
    return datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(folder / "cache"))


def through_disk(dataset, folder):
    dataset.save_to_disk(str(folder / "saved"))
    return datasets.load_from_disk(str(folder / "saved"))


@pytest.mark.parametrize(
    "change",
    [
        lambda d, _: d.shuffle(seed=1).select([3, 1]),
        lambda d, _: d.filter(lambda row: row["reward"] > 0.5),
        lambda d, _: datasets.concatenate_datasets([d, d]),
        lambda d, _: d.map(lambda row: {"answer": row["answer"] * 2}),
        lambda d, _: datasets.Dataset.from_list(d.to_list()),  # everything in 64 bits
        through_disk,
        lambda d, folder: through_json(d.remove_columns("sampling_logprobs"), folder).add_column(
            "sampling_logprobs", d["sampling_logprobs"][:]  # JSON has no NaN
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("routed", [False, True])
def test_rows_keep_their_digests(tmp_path, caplog, change, routed):
    dataset = change(datasets.Dataset(whole(routed=routed)), tmp_path)
    with caplog.at_level(logging.WARNING):
        assert len(table_to_traces(dataset.with_format("arrow")[:])) == len(dataset) > 1
    assert "reward" not in caplog.text and "trace_digest" not in caplog.text


def edited(name, edit):
    def change(table):
        rows = table[name].to_pylist()
        edit(rows)
        index = table.column_names.index(name)
        return table.set_column(index, name, pa.array(rows, table.schema.field(index).type))

    return change


def set_at(row, place, value):
    def edit(rows):
        target = rows[row]
        for step in place[:-1]:
            target = target[step]
        assert target[place[-1]] != value
        target[place[-1]] = value

    return edit


def move_a_token(rows):
    """The same ids in the same order, one of them in the next row."""
    row = next(row for row in rows if sum(map(bool, row)) > 1)
    first = next(i for i, ids in enumerate(row) if ids and i + 1 < len(row))
    row[first + 1] = [row[first].pop(), *row[first + 1]]


@pytest.mark.parametrize(
    "change",
    [
        edited("prompt_ids", set_at(2, [0], 77)),
        edited("prompt_ids", lambda rows: rows[2].append(1)),
        edited("completion_ids", set_at(2, [1], 77)),
        edited("loss_mask", lambda rows: rows[2].__setitem__(0, not rows[2][0])),
        edited("sampling_logprobs", lambda rows: rows[2].__setitem__(0, -0.125)),
        edited("support_ids", move_a_token),
        edited("routed_experts_captured", lambda rows: rows[2].__setitem__(0, not rows[2][0])),
        edited("routed_experts_layers", set_at(2, [0], 0)),
        edited("num_experts", lambda rows: rows.__setitem__(2, 299)),
        edited("sampling", set_at(2, ["temperature"], 1.01)),
        edited("sampling", set_at(2, ["top_p"], 0.91)),
        edited("sampling", set_at(2, ["top_k"], 21)),
        edited("sampling", set_at(2, ["min_p"], None)),
        edited("trace_digest", lambda rows: rows.__setitem__(2, rows[2] ^ 1)),
    ],
)
def test_every_change_of_what_decides_numbers_is_found(change):
    table = change(whole())
    with pytest.raises(ValueError, match="Row .* is not what was saved|expert") as raised:
        table_to_traces(table)
    if "not what was saved" in str(raised.value):
        assert "dataset.remove_columns('trace_digest')" in str(raised.value)
        assert len(table_to_traces(table.drop_columns(["trace_digest"]))) == 6


def test_a_reward_that_differs_is_said_and_not_refused(caplog):
    dataset = datasets.Dataset(whole())
    dataset = dataset.map(lambda row, i: {"reward": row["reward"] * (2 if i == 4 else 1)}, with_indices=True)
    with caplog.at_level(logging.WARNING):
        traces = table_to_traces(dataset.with_format("arrow")[:])
    assert traces[4].extra["reward"] == pytest.approx(8 / 3)
    assert "The reward of 1 of 6 traces (first: row 4) is not the one that was saved" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        table_to_traces(dataset.remove_columns("reward_digest").with_format("arrow")[:])
        table_to_traces(dataset.remove_columns(["reward", "reward_digest"]).with_format("arrow")[:])
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        table_to_traces(dataset.remove_columns("reward").with_format("arrow")[:])
    assert "have a reward_digest and no reward" in caplog.text


def test_traces_without_digests_are_read_and_it_is_said_once(caplog):
    table = whole()
    digest._say_unprotected.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            table_to_traces(table.drop_columns(["trace_digest"]))
        mixed = pa.concat_tables([table, table.drop_columns(["trace_digest"])], promote_options="default")
        assert len(table_to_traces(mixed)) == 12
    assert caplog.text.count("Traces without trace_digest") == 1
    rows = mixed["support_ids"].to_pylist()
    move_a_token(rows)
    index = mixed.column_names.index("support_ids")
    with pytest.raises(TraceSchemaError, match=r"\(1 of 12 rows differ\)"):
        table_to_traces(mixed.set_column(index, "support_ids", pa.array(rows, mixed.schema.field(index).type)))


def test_a_digest_of_another_type_is_named():
    table = whole()
    index = table.column_names.index("trace_digest")
    with pytest.raises(TraceSchemaError, match="trace_digest holds values of type string, not integers"):
        table_to_traces(table.set_column(index, "trace_digest", pa.array(["x"] * 6)))
