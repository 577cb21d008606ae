"""The recipes for a CPU, as their headers say they are run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.processes import environment

ROOT = Path(__file__).resolve().parents[2]


def command(*arguments, timeout=500):
    done = subprocess.run(
        [sys.executable, "-m", "trl_support_replay", *map(str, arguments)],
        cwd=ROOT,
        env=environment(VLLM_LOGGING_LEVEL="ERROR"),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def metrics(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "support/logprob_gap_max" in line]


@pytest.mark.slow
@pytest.mark.needs("vllm")
@pytest.mark.parametrize("recipe", ["cpu_smollm2", "json_smollm2"])
def test_a_cpu_recipe_trains(recipe, smollm2_path, tmp_path):
    output = tmp_path / "run"
    command(
        *("grpo", "--config", f"recipes/{recipe}.yaml"),
        *("--model_name_or_path", smollm2_path, "--output_dir", output),
    )
    steps = metrics(output)
    assert len(steps) == 10 and (output / "model.safetensors").is_file()
    for step in steps:
        assert step["support/logprob_gap_max"] <= 1e-3 and step["support/logprob_gap_mean"] <= 1e-5
        assert step["sampling/importance_sampling_ratio_raw/mean"] == pytest.approx(1, abs=1e-3)
    assert max(step["grad_norm"] for step in steps) > 0


@pytest.mark.slow
@pytest.mark.needs("vllm")
def test_the_json_demo_shows_what_stock_makes_of_a_constraint(smollm2_path, tmp_path):
    command(
        *("demo", "--task", "json", "--steps", 1, "--output", tmp_path),
        *("--models", Path(smollm2_path).parent),
        timeout=900,
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["replay"]["importance_ratio_mean"] == pytest.approx(1, abs=1e-3)
    assert summary["replay"]["logprob_gap_max"] <= 1e-4
    assert summary["stock"]["importance_ratio_mean"] < 0.5 and summary["stock"]["logprob_gap_max"] > 1


@pytest.mark.slow
def test_the_offline_recipe_trains_on_what_was_captured(smollm2_path, tmp_path):
    traces, output = tmp_path / "traces", tmp_path / "run"
    command(
        *("capture", "--model", smollm2_path, "--dataset", "recipes/data/sums/train.jsonl", "--engine", "transformers"),
        *("--top_k", 20, "--top_p", 0.9, "--num_generations", 8, "--max_tokens", 40, "--limit", 4),
        *("--output", traces),
    )
    command(
        *("grpo", "--config", "recipes/offline_smollm2.yaml", "--model_name_or_path", smollm2_path),
        *("--dataset_name", traces, "--output_dir", output),
    )
    steps = metrics(output)
    assert len(steps) == 4  # one group of 8 a step
    assert steps[0]["support/logprob_gap_max"] <= 1e-4  # before the first step the weights are those that sampled


LAUNCH = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: "no"
num_machines: 1
num_processes: 4
machine_rank: 0
main_training_function: main
use_cpu: true
"""


@pytest.mark.slow
def test_a_recipe_starts_its_own_processes(tiny_model_path, tmp_path):
    """The launch configuration that it names, with the number of processes that it says."""
    launch, recipe, output = tmp_path / "launch.yaml", tmp_path / "recipe.yaml", tmp_path / "run"
    launch.write_text(LAUNCH)
    settings = yaml.safe_load((ROOT / "recipes" / "cpu_smollm2.yaml").read_text())
    settings |= {"accelerate_config": str(launch), "num_processes": 2, "use_vllm": False, "max_steps": 2}
    settings |= {"per_device_train_batch_size": 4, "save_traces": str(tmp_path / "traces"), "max_completion_length": 8}
    for name in ("vllm_max_model_length", "vllm_engine_kwargs", "env"):
        del settings[name]
    recipe.write_text(yaml.safe_dump(settings | {"model_name_or_path": tiny_model_path, "output_dir": str(output)}))
    command("grpo", "--config", recipe)
    steps = metrics(output)
    assert len(steps) == 2 and all(step["support/logprob_gap_max"] <= 1e-4 for step in steps)
    processes = {path.stem.split("-")[3] for path in (tmp_path / "traces").glob("*.parquet")}
    assert processes == {"00000", "00001"}
