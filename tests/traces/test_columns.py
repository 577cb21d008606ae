"""Traces as Arrow columns: equal both ways, without copies of the ids, and readable by plain `datasets`."""

from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_support_replay.traces.columns import (
    Trace,
    TraceSchemaError,
    table_to_traces,
    trace_schema,
    traces_to_table,
)
from trl_support_replay.traces.dataset_columns import DatasetColumns
from trl_support_replay.traces.reading import trace_tables
from trl_support_replay.traces.routes import RoutedExperts
from trl_support_replay.traces.sampling import sampling_temperatures
from trl_support_replay.traces.shards import ShardFolder, ShardFolderError
from trl_support_replay.traces.support import SupportError, SupportRows
from trl_support_replay.trainers.trace_saving import TraceSaver

ORIGIN = {
    "model": "org/model",
    "model_revision": "main",
    "sampling": {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "min_p": 0.0, "seed": 3},
    "engine": {"name": "vllm", "version": "0.30.0"},
}


def make_trace(rng, routed=False, extra=None):
    num_prompt, num_tokens = int(rng.integers(1, 5)), int(rng.integers(0, 8))
    ids = rng.integers(0, 50, num_tokens).astype(np.int32)
    mask = rng.random(num_tokens) < 0.8
    rows = [
        list(dict.fromkeys([int(t), *rng.integers(0, 50, int(rng.integers(0, 6))).tolist()])) if on else []
        for t, on in zip(ids, mask, strict=True)
    ]
    logprobs = np.where(mask, -rng.random(num_tokens), np.nan).astype(np.float32)
    routes = None
    if routed:
        total = num_prompt + num_tokens
        experts = np.stack([[rng.permutation(300)[:2] for _ in range(3)] for _ in range(total)]) if total else None
        experts = np.zeros((0, 3, 2), int) if experts is None else experts
        routes = RoutedExperts(experts, num_experts=300, layers=(1, 2, 5), captured=rng.random(total) < 0.7)
    prompt = rng.integers(0, 50, num_prompt).astype(np.int32)
    return Trace(prompt, ids, mask, logprobs, SupportRows.from_ragged(rows), routes, extra or {})


def assert_same(a, b):
    for name in ("prompt_ids", "completion_ids", "loss_mask", "sampling_logprobs"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        assert getattr(a, name).dtype == getattr(b, name).dtype
    assert a.supports == b.supports and a.routes == b.routes and dict(a.extra) == dict(b.extra)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 6), st.booleans())
def test_tables_round_trip(seed, n, routed):
    rng = np.random.default_rng(seed)
    traces = [make_trace(rng, routed, {"reward": float(i), "answer": f"a{i}"}) for i in range(n)]
    table = traces_to_table(traces, **ORIGIN)
    back = table_to_traces(table)
    assert len(back) == n
    for a, b in zip(traces, back, strict=True):
        assert_same(a, b)
        b.check(vocab_size=50) if b.loss_mask.sum() == (b.supports.sizes > 0).sum() else None
    if n:  # a slice of a table, and a table of several chunks
        for a, b in zip(traces[n // 2 :], table_to_traces(table.slice(n // 2)), strict=True):
            assert_same(a, b)
        for a, b in zip(traces + traces, table_to_traces(pa.concat_tables([table, table])), strict=True):
            assert_same(a, b)


def test_ids_are_views_of_the_tables_buffers():
    rng = np.random.default_rng(0)
    table = traces_to_table([make_trace(rng) for _ in range(20)], **ORIGIN)
    buffers = [b for name in ("support_ids", "completion_ids") for b in table[name].chunk(0).buffers() if b is not None]
    for trace in table_to_traces(table):
        for array in (trace.supports.token_ids, trace.completion_ids):
            if len(array):
                address = array.__array_interface__["data"][0]
                assert any(b.address <= address < b.address + b.size for b in buffers)


def test_plain_datasets_reads_shards_and_streams_them(tmp_path):
    rng = np.random.default_rng(1)
    traces = [make_trace(rng, routed=True) for _ in range(5)]
    folder = ShardFolder(tmp_path / "traces")
    folder.write(traces_to_table(traces[:2], **ORIGIN), 0)
    folder.write(traces_to_table(traces[2:], **ORIGIN), 1)
    files = str(tmp_path / "traces" / "*.parquet")
    dataset = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert dataset.features == datasets.Features.from_arrow_schema(trace_schema(300))
    assert dataset[3]["support_ids"] == traces[3].supports.to_lists()
    streamed = list(datasets.load_dataset("parquet", data_files=files, split="train", streaming=True))
    assert [row["completion_ids"] for row in streamed] == [t.completion_ids.tolist() for t in traces]
    # And back, through datasets' own Arrow files.
    dataset.save_to_disk(str(tmp_path / "saved"))
    loaded = datasets.load_from_disk(str(tmp_path / "saved"))
    for a, b in zip(traces, table_to_traces(loaded.data.table), strict=True):
        assert_same(a, b)


def drop_column(table):
    return table.drop_columns(["support_ids"])


def newer(table):
    index = table.column_names.index("schema_version")
    return table.set_column(index, "schema_version", pa.array([2] * len(table), pa.int32()))


def null_row(table):
    index = table.column_names.index("support_ids")
    values = table["support_ids"].to_pylist()
    return table.set_column(
        index, "support_ids", pa.array([None, *values[1:]], trace_schema().field("support_ids").type)
    )


def null_id(table):
    index = table.column_names.index("completion_ids")
    return table.set_column(index, "completion_ids", pa.array([[None]] * len(table), pa.list_(pa.int32())))


def retyped(name, kind):
    def edit(table):
        rows = table[name].to_pylist()
        if kind.value_type == pa.string():
            rows = [[str(value) for value in row] for row in rows]
        return table.set_column(table.column_names.index(name), name, pa.array(rows, kind))

    return edit


def beyond_int32(table):
    index = table.column_names.index("prompt_ids")
    return table.set_column(index, "prompt_ids", pa.array([[7, 1 << 32]] * len(table), pa.list_(pa.int64())))


def no_lists(table):
    return table.set_column(table.column_names.index("completion_ids"), "completion_ids", pa.array([1] * len(table)))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop_column, r"columns \['support_ids'\] are missing"),
        (newer, "schema_version=2, this package reads up to 1"),
        (null_row, "Row 0 has no support_ids"),
        (null_id, "completion_ids holds an empty value"),
        (
            retyped("completion_ids", pa.list_(pa.float32())),
            "completion_ids holds values of type float, .* not integer",
        ),
        (retyped("prompt_ids", pa.list_(pa.string())), "prompt_ids holds values of type string, .* not integer"),
        (retyped("sampling_logprobs", pa.list_(pa.string())), "sampling_logprobs holds .* string, .* not floating"),
        (retyped("support_ids", pa.list_(pa.list_(pa.float64()))), "support_ids holds .* double, .* not integer"),
        (beyond_int32, "prompt_ids holds ids from 7 to 4294967296, beyond int32"),
        (no_lists, "completion_ids is of type int64, not lists of integer values"),
    ],
)
def test_broken_tables_are_refused(edit, message):
    table = traces_to_table([make_trace(np.random.default_rng(i)) for i in range(3)], **ORIGIN)
    with pytest.raises(TraceSchemaError, match=message):
        table_to_traces(edit(table))


def without(name):
    return lambda table: table.drop_columns([name])


def replaced(name, value, kind):
    return lambda table: table.set_column(
        table.column_names.index(name), name, pa.array([value, *table[name].to_pylist()[1:]], kind)
    )


def negative_shape(table):
    num_tokens, num_layers, top_k = table["routed_experts_shape"][0].as_py()
    shape = [-num_tokens, -num_layers, top_k]
    return replaced("routed_experts_shape", shape, pa.list_(pa.int32()))(table)


def shape_that_overflows(table):
    """2^22 * 2^21 * 2^21 is 0 in 64 bits."""
    empty = replaced("routed_experts", [], table.schema.field("routed_experts").type)(table)
    return replaced("routed_experts_shape", [2**22, 2**21, 2**21], pa.list_(pa.int32()))(empty)


ROUTE_COLUMNS = ("routed_experts_shape", "routed_experts_captured", "routed_experts_layers", "num_experts")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        *((without(name), rf"without the columns \['{name}'\]") for name in ROUTE_COLUMNS),
        *(
            (replaced(name, None, trace_schema(300).field(name).type), f"Row 0 has no {name}")
            for name in ("routed_experts", *ROUTE_COLUMNS)
        ),
        (replaced("num_experts", 300.0, pa.float64()), "num_experts holds values of type double, .* not integer"),
        (negative_shape, r"do not fill a shape of \[-"),
        (shape_that_overflows, "0 expert ids do not fill a shape of"),
    ],
)
def test_broken_routes_are_refused(edit, message):
    table = traces_to_table([make_trace(np.random.default_rng(i), routed=True) for i in range(3)], **ORIGIN)
    with pytest.raises(TraceSchemaError, match=message):
        table_to_traces(edit(table))


def good():
    rows = SupportRows.from_ragged([[4, 5], [], [7]])
    logprobs = np.array([-0.5, np.nan, 0.0], np.float32)
    return [np.array([1], np.int32), np.array([4, 9, 7], np.int32), np.array([True, False, True]), logprobs, rows]


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (2, np.array([True]), "3 tokens, but 1 loss_mask"),
        (3, np.array([0.5, np.nan, 0.0], np.float32), "token 0 has log-prob 0.5"),
        (3, np.array([np.nan, np.nan, 0.0], np.float32), "token 0 has log-prob nan"),
        (3, np.array([-np.inf, np.nan, 0.0], np.float32), "trace 5: token 0 has log-prob -inf"),
        (0, np.array([], np.int32), "trace 5 has no prompt .prompt_ids is empty"),
        (0, np.array([3, -2], np.int32), "trace 5: id -2 at position 1 of prompt_ids is negative"),
        (2, np.array([True, True, True]), "1 loss-bearing tokens have no support .first at token 1 of 3"),
        (4, SupportRows.from_ragged([[3, 5], [], [7]]), "row 0|token 0"),
        (4, SupportRows.from_ragged([[4, 99], [], [7]]), "99"),
    ],
)
def test_check_names_what_is_wrong(index, value, message):
    fields = good()
    Trace(*fields).check(vocab_size=50)
    fields[index] = value
    with pytest.raises((TraceSchemaError, SupportError), match=message):
        Trace(*fields).check("trace 5", vocab_size=50)


@pytest.mark.parametrize("name", ["completion_ids", "model", "sampling", "routed_experts", "schema_version"])
def test_dataset_columns_do_not_take_the_place_of_the_traces_own(name):
    trace = make_trace(np.random.default_rng(0), extra={"answer": 1, name: "mine"})
    with pytest.raises(TraceSchemaError, match=f"fill themselves: {name}. Rename them.*'source_{name}'"):
        traces_to_table([trace], **ORIGIN)


def test_save_traces_refuses_such_columns_before_training(tmp_path):
    trainer = SimpleNamespace(train_dataset=datasets.Dataset.from_dict({"prompt": ["a"], "model": ["b"]}))
    args = SimpleNamespace(save_traces=str(tmp_path), remove_unused_columns=False)
    with pytest.raises(TraceSchemaError, match="save_traces=.*: the training dataset has .* themselves: model. Rename"):
        TraceSaver(args, trainer)
    TraceSaver(SimpleNamespace(save_traces=str(tmp_path), remove_unused_columns=True), trainer)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (pa.array([{"temperature": 0.5}, None]), "shard, row 1: sampling.temperature is None"),
        (pa.array([{"temperature": 0.5}, {"temperature": 0.0}]), "shard, row 1: sampling.temperature is 0.0"),
        (pa.array([{"temperature": 0.5}, {"temperature": np.nan}]), "shard, row 1: sampling.temperature is nan"),
        (pa.array([{"temperature": "1"}, {"temperature": "1"}]), "shard, row 0: sampling.temperature is '1'"),
        (pa.array(["hot", "cold"]), "shard: `sampling` is of type string"),
        (pa.array([{"top_p": 0.5}] * 2), "shard: `sampling` is of type struct"),
    ],
)
def test_temperatures_that_nothing_is_sampled_at_are_named(sampling, message):
    with pytest.raises(TraceSchemaError, match=message):
        sampling_temperatures(pa.table({"sampling": sampling}), "shard")


def test_long_supports_take_about_a_byte_per_id_on_disk(tmp_path):
    """Sizes as those of a language model's supports at top_p=0.95: a mean near 500, a median near 150."""
    rng = np.random.default_rng(0)
    sizes = np.minimum(9201, np.exp(rng.normal(5.05, 1.55, 1000)).astype(int) + 1)
    rows = SupportRows.from_ragged([np.sort(rng.choice(49_152, size, replace=False)) for size in sizes])
    ids = rows.token_ids[rows.offsets[:-1]]
    trace = Trace(ids[:5], ids, np.ones(1000, bool), -rng.random(1000, dtype=np.float32), rows)
    path = ShardFolder(tmp_path).write(traces_to_table([trace], **ORIGIN), 0)
    assert path.stat().st_size / rows.nnz < 1.3
    assert table_to_traces(pq.read_table(path))[0].supports == rows
    assert datasets.Dataset.from_parquet(str(path))["support_ids"][0] == rows.to_lists()


def test_temperatures_of_a_table():
    table = pa.table({"sampling": pa.array([{"temperature": 0.5}, {"temperature": 2.0}])})
    assert sampling_temperatures(table, "shard") == {0.5, 2.0}
    with pytest.raises(TraceSchemaError, match="no `sampling` column"):
        sampling_temperatures(pa.table({"other": [1]}), "shard")


def test_flipped_bits_in_a_shard_are_found(tmp_path):
    rng = np.random.default_rng(0)
    path = ShardFolder(tmp_path).write(traces_to_table([make_trace(rng) for _ in range(50)], **ORIGIN), 0)
    ((_, whole),) = trace_tables(path)
    assert whole.num_rows == 50
    chunk = pq.ParquetFile(path).metadata.row_group(0).column(0)
    body = bytearray(path.read_bytes())
    body[chunk.data_page_offset + chunk.total_compressed_size - 3] ^= 1
    path.write_bytes(body)
    with pytest.raises(TraceSchemaError, match="checksum"):
        list(trace_tables(path))


def test_a_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ShardFolderError, match=r"--output .*file is not a folder that can be written \(File exists\)"):
        ShardFolder(tmp_path / "file", "--output")


def test_tables_do_not_mix():
    rng = np.random.default_rng(0)
    with pytest.raises(TraceSchemaError, match="1 of 2 traces have routes"):
        traces_to_table([make_trace(rng), make_trace(rng, routed=True)], **ORIGIN)
    with pytest.raises(TraceSchemaError, match="has the columns"):
        traces_to_table([make_trace(rng, extra={"reward": 1.0}), make_trace(rng)], **ORIGIN)


def test_shards_are_whole_or_absent(tmp_path, monkeypatch):
    table = traces_to_table([make_trace(np.random.default_rng(0))], **ORIGIN)
    folder = ShardFolder(tmp_path)
    folder.write(table, 0)
    folder.write(table, 7, part=1)
    import trl_support_replay.traces.shards as shards

    def torn(table, file, **kwargs):
        file.write(b"PAR1 half")
        raise KeyboardInterrupt

    monkeypatch.setattr(shards.pq, "write_table", torn)
    with pytest.raises(KeyboardInterrupt):
        folder.write(table, 8)
    assert [p.name for p in folder.shards()] == [
        "traces-00000000-000-00000.parquet",
        "traces-00000007-000-00001.parquet",
    ]
    assert not list(tmp_path.glob(".*"))
    (tmp_path / ".traces-00000009-000-00000.parquet.1.partial").write_bytes(b"PAR1")
    (tmp_path / ".capture.json.1.partial").write_bytes(b"{")
    assert [p.name for p in folder.discard_from(5)] == ["traces-00000007-000-00001.parquet"]
    assert not list(tmp_path.glob(".*")) and len(folder.shards()) == 1


def test_fewer_processes_remove_what_more_have_written(tmp_path):
    table = traces_to_table([make_trace(np.random.default_rng(0))], **ORIGIN)
    folder = ShardFolder(tmp_path)
    for part in range(5):
        folder.write(table, 3, part=part)
        (tmp_path / f".traces-00000004-000-0000{part}.parquet.1.partial").write_bytes(b"PAR1")
    assert [p.name[-9:-8] for p in folder.discard_from(3, 1, 2)] == ["1", "3"]
    assert sorted(p.name[25:26] for p in tmp_path.glob(".*")) == ["0", "2", "4"]
    folder.discard_from(3, 0, 2)
    assert not list(tmp_path.iterdir())


def test_shards_that_a_killed_run_wrote_only_partly_anew_get_one_type(tmp_path):
    """A column of nulls gets a type in a later batch, and the run dies while it writes the earlier shards anew."""
    folder = ShardFolder(tmp_path)

    def shard(value):
        return traces_to_table([make_trace(np.random.default_rng(0), extra={"note": value})], **ORIGIN)

    for number in range(3):
        folder.write(shard(None), number)
    folder.write(shard("rewritten"), 0)
    resumed = DatasetColumns(None)
    folder.write(resumed.settle(shard("new"), folder, 0, 1), 3)
    assert {str(pq.read_schema(path).field("note").type) for path in folder.shards()} == {"string"}


def test_a_column_of_nulls_keeps_the_type_of_its_dataset(tmp_path):
    calls = [{"role": "user", "content": "?", "calls": None}]
    types = {
        "answer": pa.string(),
        "prompt": pa.list_(pa.struct({k: pa.string() for k in ("role", "content", "calls")})),
    }
    folder = ShardFolder(tmp_path)
    for number, answer in enumerate((None, "four")):
        trace = make_trace(np.random.default_rng(number), extra={"answer": answer, "prompt": calls})
        folder.write(traces_to_table([trace], **ORIGIN, types=types), number)
    assert datasets.load_dataset("parquet", data_files=f"{tmp_path}/*.parquet", split="train")["answer"] == [
        None,
        "four",
    ]


def test_where_a_model_lies_is_not_recorded(tmp_path):
    trace = make_trace(np.random.default_rng(0))
    names = [
        traces_to_table([trace], **ORIGIN | {"model": m})["model"][0].as_py() for m in ("/home/me/runs/best", "a/b")
    ]
    assert names == ["best", "a/b"]
