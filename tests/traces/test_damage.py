"""Damaged files of traces, through every path that reads them: an error of this package, or what was saved."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.processes import environment
from tests.traces import damage
from trl_support_replay.traces.columns import TraceSchemaError, table_to_traces, traces_to_table
from trl_support_replay.traces.reading import trace_dataset, trace_tables, traces_of
from trl_support_replay.traces.record import FolderRecord
from trl_support_replay.traces.shards import ShardFolder, ShardFolderError


def test_sixty_damaged_folders(tiny_model_path, tmp_path):
    rows = damage.fuzz(60, 7, tiny_model_path, tmp_path, models_every=9)
    assert [row for row in rows if row["outcome"] not in damage.GOOD] == []
    found = Counter(row["outcome"] for row in rows)
    assert found["our error"] > 100 and found["identical"] > 20 and len({row["path"] for row in rows}) >= 9


@pytest.mark.slow
def test_five_hundred_damaged_folders(tiny_model_path):
    """In a process of its own, which a reader that follows wild offsets would end."""
    command = [sys.executable, "-m", "tests.traces.damage", "--number", "500", "--model", tiny_model_path]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment(), capture_output=True, text=True, timeout=3000)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def table(number=0):
    traces = damage.make_traces(np.random.default_rng(number), False)
    return traces_to_table(traces, model="m", sampling=damage.SAMPLING, engine={})


@pytest.fixture
def saved(tmp_path):
    datasets.Dataset(table()).save_to_disk(str(tmp_path / "saved"))
    return tmp_path / "saved"


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"null"])
def test_damaged_json_of_a_saved_dataset_is_named(saved, name, content):
    (saved / name).write_bytes(content)
    with pytest.raises(TraceSchemaError, match=rf"{name if content != b'null' else saved.name}.* is not a? ?whole"):
        list(trace_tables(saved))


def test_a_missing_part_of_a_saved_dataset_is_named(saved):
    (saved / "state.json").rename(saved / "moved")
    with pytest.raises(TraceSchemaError, match="state.json cannot be read: No such file"):
        list(trace_tables(saved))
    (saved / "moved").rename(saved / "state.json")
    (arrow,) = saved.glob("*.arrow")
    body = arrow.read_bytes()
    arrow.write_bytes(body[: len(body) // 2])
    with pytest.raises(TraceSchemaError, match=rf"{arrow.name} is not a whole Arrow file: .* Restore it from a copy"):
        list(trace_tables(saved))


def test_the_splits_of_a_saved_dataset_are_named(saved):
    splits = {"train": datasets.Dataset(table()), "test": datasets.Dataset(table(1))}
    datasets.DatasetDict(splits).save_to_disk(str(saved.parent / "both"))
    with pytest.raises(TraceSchemaError, match=r"both is a dataset of the splits \['test', 'train'\]. Name the folder"):
        list(trace_tables(saved.parent / "both"))
    assert next(trace_tables(saved.parent / "both" / "train"))[1].num_rows == 4


def test_offsets_that_lead_nowhere_are_not_followed():
    whole = table()
    ids = whole["completion_ids"].chunk(0)
    wild = pa.ListArray.from_buffers(
        ids.type, len(ids), [None, pa.py_buffer(np.array([0, 9, 4, 1 << 30, 20], np.int32))], children=[ids.values]
    )
    index = whole.column_names.index("completion_ids")
    with pytest.raises(TraceSchemaError, match="The table is damaged"):
        table_to_traces(whole.set_column(index, "completion_ids", wild))


def test_rows_that_the_metadata_leave_out_are_missed(tmp_path):
    """A file that says that it has fewer rows than its pages hold."""
    whole = pa.concat_tables([table(number) for number in range(3)])  # 12 rows
    path = ShardFolder(tmp_path).write(whole, 0)
    body = path.read_bytes()
    footer = int.from_bytes(body[-8:-4], "little") + 8
    fewer = 0
    for place in range(len(body) - footer, len(body) - 8):
        if body[place] != 24:  # how 12 is written
            continue
        for bit in range(8):
            path.write_bytes(body[:place] + bytes([body[place] ^ 1 << bit]) + body[place + 1 :])
            try:
                fewer += pq.ParquetFile(path).read().num_rows < 12
            except (pa.ArrowException, OSError):
                continue
            try:
                ((_, read),) = trace_tables(path)
            except TraceSchemaError:
                continue
            assert read.num_rows == 12
    assert fewer, "no bit makes a reader leave rows out, so this showed nothing"


def test_a_folder_named_like_a_partition_adds_no_column(tmp_path):
    folder = ShardFolder(tmp_path / "reward=7")
    folder.write(table(), 0)
    ((name, read),) = trace_tables(folder.path)
    assert read.equals(table()) and traces_of(name, read)[0].extra["reward"] != 7


def test_the_folders_inside_are_not_read(tmp_path):
    folder = ShardFolder(tmp_path)
    folder.write(table(), 0)
    folder.set_aside()
    folder.write(table(1), 0)
    assert trace_dataset(tmp_path).to_list() == datasets.Dataset(table(1)).to_list()


def test_a_full_disk_names_the_folder(tmp_path):
    resource = pytest.importorskip("resource")
    folder = ShardFolder(tmp_path)
    folder.write(table(), 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, hard))
    try:
        with pytest.raises(ShardFolderError, match=rf"traces-00000001.* cannot be written .*Make room in {tmp_path}"):
            folder.write(table(1), 1)
        with pytest.raises(ShardFolderError, match="run.json cannot be written"):
            FolderRecord(tmp_path / "run.json", "run", {"name": "x" * 500}).write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == [folder.shards()[0].name]
