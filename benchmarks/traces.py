"""What do supports cost on disk, and how long do they take to load?

    python -m benchmarks.traces            # prints the table and writes benchmarks/data/traces.csv

The same traces are kept as this package's Parquet shards and as Arrow files (what `datasets` maps into memory), and, to
compare, as JSON and pickled nested Python lists. "Loaded" means: from a file in the page cache to something that a
trainer can index by sample and token. From Parquet and Arrow that is arrays, by `table_to_traces`, or nested lists, as
plain `datasets` makes them. "Unverified" leaves the digest of each trace out. Times are CPU times on one thread.

Supports are drawn with 47 % singletons, median 2, mean 8 and 99th percentile 82; ids are uniform over the vocabulary,
which nothing compresses, or Zipf-distributed.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import pickle
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trl_support_replay.traces.columns import Trace, table_to_traces, traces_to_table
from trl_support_replay.traces.digest import DIGEST
from trl_support_replay.traces.shards import ShardFolder
from trl_support_replay.traces.support import SupportRows

from .results import write_rows

VOCAB_SIZE = 151_936
DATA = Path(__file__).parent / "data" / "traces.csv"


def draw_sizes(rng: np.random.Generator, num_tokens: int) -> np.ndarray:
    """`[num_tokens]` support sizes: 47 % ones, the rest log-normal from 2 up."""
    rest = np.maximum(2, rng.lognormal(1.96, 1.176, num_tokens)).astype(np.int64)
    return np.where(rng.random(num_tokens) < 0.47, 1, np.minimum(rest, 2000))


def draw_traces(rng: np.random.Generator, num_tokens: int, ids: str, lengths: tuple[int, int]) -> list[Trace]:
    """Completions with `lengths` (least, most) after prompts of 100, `num_tokens` completion tokens in all."""
    traces = []
    left = num_tokens
    while left > 0:
        length = min(int(rng.integers(*lengths)), left)
        left -= length
        sizes = draw_sizes(rng, length)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        if ids == "uniform":
            candidates = rng.integers(0, VOCAB_SIZE, offsets[-1])
        else:
            candidates = np.minimum(rng.zipf(1.2, offsets[-1]), VOCAB_SIZE) - 1
        support = SupportRows(candidates, offsets)
        logprobs = np.where(sizes == 1, 0.0, -rng.exponential(1.0, length)).astype(np.float32)
        prompt = rng.integers(0, VOCAB_SIZE, 100).astype(np.int32)
        traces.append(Trace(prompt, support.token_ids[offsets[:-1]], np.ones(length, bool), logprobs, support))
    return traces


def milliseconds(loads: Sequence[Callable[[], Any]], repeats: int) -> np.ndarray:
    """`[len(loads), repeats]` CPU times, after one run that warms the page cache.

    The cases take turns, and time is CPU time of the process, so that a busy machine is unfair to none of them.
    """
    times = np.zeros((len(loads), repeats + 1))
    for repeat in range(repeats + 1):
        for case, load in enumerate(loads):
            gc.collect()
            start = time.process_time()
            result = load()
            times[case, repeat] = (time.process_time() - start) * 1e3
            del result
    return times[:, 1:]


def open_arrow(path: Path) -> pa.Table:
    """The table of an Arrow file, mapped into memory."""
    return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()


def measure(num_tokens: int, ids: str, lengths: tuple[int, int], repeats: int, folder: Path) -> list[dict[str, Any]]:
    """One row for each way of keeping and loading the traces."""
    traces = draw_traces(np.random.default_rng(0), num_tokens, ids, lengths)
    sampling = {"temperature": 1.0, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "seed": 0}
    table = traces_to_table(traces, model="model", sampling=sampling, engine={"name": "vllm", "version": "0.30.0"})

    shard = ShardFolder(folder / "shards").write(table, 0)
    arrow = folder / "traces.arrow"
    with pa.OSFile(str(arrow), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    lists = table.to_pylist()
    json_file, pickle_file = folder / "traces.json", folder / "traces.pickle"
    json_file.write_bytes(msgspec.json.encode(lists))
    pickle_file.write_bytes(pickle.dumps(lists))
    del lists

    back = table_to_traces(pq.read_table(shard))
    assert all(
        a.supports == b.supports
        and np.array_equal(a.completion_ids, b.completion_ids)
        and np.array_equal(a.sampling_logprobs, b.sampling_logprobs)
        for a, b in zip(traces, back, strict=True)
    )

    cases: list[tuple[str, str, Path, Callable[[], Any]]] = [
        ("arrow", "arrays", arrow, lambda: table_to_traces(open_arrow(arrow))),
        ("arrow", "arrays, unverified", arrow, lambda: table_to_traces(open_arrow(arrow).drop_columns([DIGEST]))),
        ("parquet", "arrays", shard, lambda: table_to_traces(pq.read_table(shard))),
        ("arrow", "nested lists", arrow, lambda: open_arrow(arrow).to_pylist()),
        ("arrow", "nested lists, by datasets", arrow, lambda: datasets.Dataset(open_arrow(arrow))[:]),
        ("parquet", "nested lists", shard, lambda: pq.read_table(shard).to_pylist()),
        ("json", "nested lists, by json", json_file, lambda: json.loads(json_file.read_bytes())),
        ("json", "nested lists, by msgspec", json_file, lambda: msgspec.json.decode(json_file.read_bytes())),
        ("pickle", "nested lists", pickle_file, lambda: pickle.loads(pickle_file.read_bytes())),
    ]
    rows = []
    for (kept, loaded, path, _), times in zip(cases, milliseconds([case[-1] for case in cases], repeats), strict=True):
        low, median, high = np.percentile(times, [20, 50, 80])
        rows.append(
            {
                "ids": ids,
                "tokens": num_tokens,
                "traces": len(traces),
                "mean_support": round(sum(t.supports.nnz for t in traces) / num_tokens, 2),
                "kept_as": kept,
                "loaded_as": loaded,
                "bytes_per_token": round(path.stat().st_size / num_tokens, 1),
                "load_cpu_ms_p20": round(low, 2),
                "load_cpu_ms_median": round(median, 2),
                "load_cpu_ms_p80": round(high, 2),
            }
        )
    fastest = rows[0]["load_cpu_ms_median"]
    for row in rows:
        row["times_arrow_arrays"] = round(row["load_cpu_ms_median"] / fastest, 1)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="completion tokens")
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each case")
    parser.add_argument("--output", type=Path, default=DATA, help="CSV file to write")
    options = parser.parse_args()
    pa.set_cpu_count(1)
    machine = {
        "cpus": os.cpu_count(),
        "cpu": platform.processor() or platform.machine(),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
        "numpy": np.__version__,
        "datasets": datasets.__version__,
        "msgspec": msgspec.__version__,
    }
    rows = []
    for ids, lengths in itertools.product(("uniform", "zipf"), ((100, 400), (500, 4000))):
        with tempfile.TemporaryDirectory() as folder:
            found = measure(options.tokens, ids, lengths, options.repeats, Path(folder))
            rows += [row | machine for row in found]
    write_rows(options.output, rows)
    for row in rows:
        case = f"{row['ids']:8} {row['traces']:4} traces  {row['kept_as']:8} {row['loaded_as']:26}"
        speed = f"{row['load_cpu_ms_median']:8.2f} ms {row['times_arrow_arrays']:6.1f} x"
        print(f"{case} {row['bytes_per_token']:6.1f} bytes/token {speed}")


if __name__ == "__main__":
    main()
