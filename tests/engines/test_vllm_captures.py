"""Supports that are taken in vLLM's worker are those of the engine's log-probs, whatever else a batch does."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from .mixed_batch import save_model

pytestmark = pytest.mark.needs("vllm")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "mixed")


@pytest.mark.parametrize(
    ("multiprocessing", "engine"),
    [
        pytest.param("0", [], id="in this process", marks=pytest.mark.slow),
        pytest.param("1", [], id="in its own process", marks=pytest.mark.slow),
        pytest.param(
            "1",
            ["tensor_parallel_size=2", "distributed_executor_backend=mp"],
            id="two workers",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_captured_supports_are_the_finite_logprobs(model, multiprocessing, engine):
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": multiprocessing,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two workers may have to share a core
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.engines.mixed_batch", model, *engine]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert done.returncode == 0 and lines, done.stderr[-4000:]
    found = json.loads(lines[0].removeprefix("FOUND "))
    assert found["capture"] == "worker" and found["unmarked"] == 0
    assert found["rows"] == found["equal"] == found["arrays"] == 1920
    assert found["gap"] < 1e-4 and found["largest"] > 500
    assert found["preemptions"] >= 1 and found["chunked"] >= 10 and found["cached"] >= 10
