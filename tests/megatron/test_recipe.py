"""`recipes/megatron`, as its docstrings say it is run, on the CPU."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from trl_support_replay.traces.columns import table_to_traces

ROOT = Path(__file__).resolve().parents[2]
ON_CPU = str(Path(__file__).with_name("on_cpu.py"))
RECIPE = ROOT / "recipes" / "megatron"


def run(script: str, *arguments: str, num_ranks: int = 1) -> str:
    """Output of a script, under torchrun if there are several ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    process = subprocess.Popen(
        [sys.executable, *(torchrun if num_ranks > 1 else ()), ON_CPU, str(RECIPE / script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=500)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks, too
        raise
    assert process.returncode == 0, errors[-3000:]
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    output = run("make_traces.py", f"--folder={folder}", "--prompts=2", "--longest=8")
    assert output.startswith("8 traces of ")
    return folder


def steps(output: str) -> tuple[float, list[dict[str, float]]]:
    """Gap before the first step, and the metrics of each step."""
    gap = re.search(r"log-prob gap before the first step: (\S+)", output)
    assert gap is not None, output
    lines = [line.split() for line in output.splitlines() if line.startswith("step ")]
    return float(gap[1]), [
        {name: float(value) for name, value in zip(line[2::2], line[3::2], strict=True)} for line in lines
    ]


def check(output: str) -> list[dict[str, float]]:
    gap, metrics = steps(output)
    assert 0 < gap < 1e-4
    assert len(metrics) == 2
    assert metrics[0]["ratio"] == 1.0
    assert metrics[0]["clipped_fraction"] == 0.0
    assert metrics[0]["grad_norm"] > 0
    assert metrics[1]["ratio"] != 1.0
    return metrics


def test_traces_are_whole(folder: Path) -> None:
    dataset = datasets.load_dataset("parquet", data_files=f"{folder}/traces/*.parquet", split="train")
    traces = table_to_traces(dataset.with_format("arrow")[:])
    for i, trace in enumerate(traces):
        trace.check(f"trace {i}", vocab_size=256)
        assert trace.routes is not None
        assert trace.routes.captured_prefix == len(trace.prompt_ids) + len(trace.completion_ids) - 1
        assert 1 <= trace.supports.sizes.min() <= trace.supports.sizes.max() <= 20


def test_training_on_two_ranks(folder: Path) -> None:
    check(run("train.py", f"--folder={folder}", "--steps=2", "--tensor=2", num_ranks=2))


@pytest.mark.slow
def test_every_split_takes_the_same_steps(folder: Path) -> None:
    arguments = f"--folder={folder}", "--steps=2"
    alone = check(run("train.py", *arguments))
    for num_ranks, split in (
        (2, ("--tensor=2",)),
        (2, ("--pipeline=2", "--virtual-pipeline=2", "--recompute")),
        (4, ("--tensor=2", "--pipeline=2", "--expert=2")),
    ):
        for have, want in zip(check(run("train.py", *arguments, *split, num_ranks=num_ranks)), alone, strict=True):
            assert have == pytest.approx(want, rel=2e-3, abs=2e-4), split
    # With data parallelism the micro-batches are others, and each is averaged by itself.
    check(run("train.py", *arguments, "--expert=2", "--micro-batch-size=2", num_ranks=2))
