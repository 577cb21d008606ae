"""A writer that is killed at random moments leaves whole shards, and a resumed one ends where an unbroken one does."""

import random
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest

from trl_support_replay.traces.columns import table_to_traces
from trl_support_replay.traces.shards import ShardFolder

NUM_SHARDS = 60
# Writers are forked from a process that has imported everything and used nothing yet, so that each starts at once. Its
# orders are a folder and when to kill the writer: seconds after its first shard, or "never".
WRITERS = """
import os, signal, sys, time
import numpy as np
from trl_support_replay.traces.columns import Trace, traces_to_table
from trl_support_replay.traces.shards import ShardFolder
from trl_support_replay.traces.support import SupportRows

def write(path, num_shards, started):
    folder = ShardFolder(path)
    number = len(folder.shards())
    folder.discard_from(number)
    for n in range(number, num_shards):
        rng = np.random.default_rng(n)
        ids = rng.integers(0, 1000, 2000).astype(np.int32)
        rows = SupportRows(np.stack([ids, ids + 1], axis=1).reshape(-1), np.arange(0, 4001, 2))
        trace = Trace(ids[:5], ids, np.ones(2000, bool), -rng.random(2000, dtype=np.float32), rows)
        folder.write(traces_to_table([trace], model="m", sampling={}, engine={}), n)
        os.write(started, b".")

for line in sys.stdin:
    path, kill_after = line.strip().split("\\t")
    done, started = os.pipe()
    child = os.fork()
    if child == 0:
        write(path, int(sys.argv[1]), started)
        os._exit(0)
    os.close(started)
    os.read(done, 1)
    if kill_after != "never":
        time.sleep(float(kill_after))
        os.kill(child, signal.SIGKILL)
    print(os.waitpid(child, 0)[1], flush=True)
    os.close(done)
"""


@pytest.fixture
def writers():
    command = [sys.executable, "-c", WRITERS, str(NUM_SHARDS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.stdin.close()


def write(writers, folder, kill_after="never"):
    """Let a writer write all that is missing, or kill it on the way; returns its wait status."""
    print(folder, kill_after, sep="\t", file=writers.stdin, flush=True)
    return int(writers.stdout.readline())


def test_twenty_kills_cost_no_shard_and_double_none(tmp_path, writers):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    start = time.monotonic()
    assert write(writers, unbroken) == 0
    one_shard = (time.monotonic() - start) / NUM_SHARDS
    rng = random.Random(0)
    torn = whole = 0
    for _ in range(20):
        assert write(writers, broken, rng.uniform(0, 2 * one_shard)) in (0, signal.SIGKILL)
        shards = ShardFolder(broken).shards()
        for shard in shards[whole:]:
            for trace in table_to_traces(pq.read_table(shard)):
                trace.check(str(shard))
        assert [int(shard.name.split("-")[1]) for shard in shards] == list(range(len(shards)))
        whole = len(shards)
        torn += len(list(broken.glob(".traces-*")))
    assert torn > 0, "no kill came in the middle of a shard, so this showed nothing"
    assert write(writers, broken) == 0
    names = sorted(path.name for path in unbroken.iterdir())
    assert sorted(path.name for path in broken.iterdir()) == names and len(names) == NUM_SHARDS
    for name in names:
        assert pq.read_table(broken / name).equals(pq.read_table(unbroken / name))
