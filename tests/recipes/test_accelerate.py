"""The launch configurations under `recipes/accelerate`: Accelerate reads them, and they train."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from tests.processes import environment

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "accelerate"
NAMES = ("ddp", "fsdp2", "tp", "zero2", "zero3")


def test_every_configuration_is_known():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_reads_it(name):
    path = FOLDER / f"{name}.yaml"
    config = load_config_from_file(str(path))
    assert config.num_processes > 1 and config.mixed_precision == "bf16"
    assert f"--config_file recipes/accelerate/{name}.yaml" in path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ddp", *(pytest.param(name, marks=pytest.mark.needs("deepspeed")) for name in ("zero2", "zero3"))]
)
def test_it_trains(name, tiny_model_path, tmp_path):
    """On two processes of a CPU, in float32; all else as it stands. (Accelerate has no FSDP2 on a CPU.)"""
    config = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    config |= {"num_processes": 2, "mixed_precision": "no", "use_cpu": True}
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump(config))
    settings = {"samples": True, "per_device_train_batch_size": 4}
    launch = ["accelerate.commands.launch", "--main_process_port", "0", "--config_file", path]
    worker = ["-m", "tests.trainers.sharding_worker", tiny_model_path, tmp_path / "run", json.dumps(settings)]
    done = subprocess.run(
        [sys.executable, "-m", *map(str, (*launch, *worker))],
        env=environment(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-16000:]
    got = torch.load(tmp_path / "run" / "result.pt")
    assert got["processes"] == 2
    for log in got["log"][:3]:
        assert log["support/logprob_gap_max"] <= 1e-4 and log["sampling/outside_10pct"] == 0
