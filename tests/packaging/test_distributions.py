"""The wheel and the source distribution: what is in them, and what runs with the core dependencies alone."""

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import trl_support_replay

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def core_closure():
    """Distributions that the core dependencies need, found in what is installed here."""
    waiting = [Requirement(line) for line in PROJECT["dependencies"]]
    found = {}
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # left out of the pins on purpose: the GPU libraries of torch
        waiting += [Requirement(line) for line in found[name].requires or []]
    return found


@pytest.fixture(scope="module")
def bare(distributions, tmp_path_factory):
    """Python of a new environment with the wheel, and links to its core dependencies only."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for distribution in core_closure().values():
        for part in {file.parts[0] for file in distribution.files or [] if ".." not in file.parts}:
            source = Path(distribution.locate_file(part))
            if source.exists() and part != "__pycache__" and not (site / part).exists():
                (site / part).symlink_to(source)
    wheel, _ = distributions
    install = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-q"]
    # With this tree on PYTHONPATH, pip would take the package for installed.
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*install, "--no-index", "--no-deps", str(wheel)], check=True, env=clean)
    return folder / "bin"


def run(program, *arguments):
    done = subprocess.run(
        [str(program), *map(str, arguments)],
        env={"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "HOME": os.environ.get("HOME", "/")},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_wheel_holds_every_module_and_nothing_else(distributions):
    wheel, _ = distributions
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
        (record,) = [archive.read(n).decode() for n in archive.namelist() if n.endswith("METADATA")]
    tracked = subprocess.run(
        ["git", "ls-files", "trl_support_replay"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert names == set(tracked.stdout.split())
    assert "trl_support_replay/py.typed" in names
    assert f"\nVersion: {trl_support_replay.__version__}\n" in record and "License-Expression: Apache-2.0" in record


def test_the_source_distribution_builds_the_same_wheel_elsewhere(distributions):
    _, sdist = distributions
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "trl_support_replay/py.typed"} <= names


def test_versions_agree():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {PROJECT['version']}\n" in citation
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == PROJECT["version"]
    assert trl_support_replay.__version__ == PROJECT["version"]


def test_core_dependencies_are_what_modules_import_at_their_top():
    """An optional package is imported where it is used, so that the rest works without it."""
    optional = {"vllm", "peft", "deepspeed", "megatron", "matplotlib", "gguf", "math_verify", "trackio", "wandb"}
    # A room that needs an extra, and says so; and a module that vLLM loads into its own processes.
    exceptions = {"megatron": {"megatron"}, "engine_outputs/vllm_worker.py": {"vllm"}}
    for path in (ROOT / "trl_support_replay").rglob("*.py"):
        place = path.relative_to(ROOT / "trl_support_replay")
        allowed = exceptions.get(place.parts[0], set()) | exceptions.get(place.as_posix(), set())
        for node in ast.parse(path.read_text()).body:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found = {name.split(".")[0] for name in names} & optional
            assert found <= allowed, f"{path.relative_to(ROOT)}:{node.lineno} imports {found}"


@pytest.mark.slow
def test_the_wheel_runs_with_core_dependencies_alone(bare):
    code, _, errors = run(bare / "python", "-c", "import vllm")
    assert code == 1 and "No module named 'vllm'" in errors  # else the rest would prove nothing
    code, output, errors = run(
        bare / "python", "-c", "import trl_support_replay as t; print(t.__file__, t.__version__)"
    )
    assert code == 0 and "site-packages" in output, errors
    code, output, errors = run(bare / "trl-support-replay", "env")
    assert code == 0 and "pip install 'trl-support-replay[vllm]'" in output, output + errors
    names = ", ".join(trl_support_replay.__all__)
    code, _, errors = run(bare / "python", "-c", f"from trl_support_replay import {names}")
    assert code == 0, errors
    code, _, errors = run(bare / "trl-support-replay", "grpo", "--help")
    assert code == 0, errors


TRAIN = """
import json, sys
from datasets import Dataset
from trl_support_replay import SupportReplayGRPOConfig, SupportReplayGRPOTrainer

args = SupportReplayGRPOConfig(
    output_dir=sys.argv[2], use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, max_steps=2, logging_steps=1,
    save_strategy="no", top_p=0.9, per_device_train_batch_size=4, num_generations=4, max_completion_length=8,
)
data = Dataset.from_dict({"prompt": [f"{n}+1=" for n in range(8)]})
reward = lambda completions, **_: [float(len(set(text))) for text in completions]
trainer = SupportReplayGRPOTrainer(sys.argv[1], reward, args, train_dataset=data)
trainer.train()
print("@log " + json.dumps(trainer.state.log_history))
"""


@pytest.mark.slow
def test_the_wheel_trains_with_core_dependencies_alone(bare, tiny_model_path, tmp_path):
    code, output, errors = run(bare / "python", "-c", TRAIN, tiny_model_path, tmp_path)
    assert code == 0, errors
    (line,) = (line for line in output.splitlines() if line.startswith("@log "))
    gaps = [log["support/logprob_gap_max"] for log in json.loads(line[5:]) if "support/logprob_gap_max" in log]
    assert len(gaps) == 2 and max(gaps) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("trl-support-replay", "vllm-serve", "model"), "vllm"),
        (("trl-support-replay", "demo", "--output", "{tmp}"), "vllm"),
        (("python", "-c", "import trl_support_replay.megatron"), "megatron"),
        (
            ("python", "-c", "from trl_support_replay.cli.demo.model import fetch_smollm2 as f; f('{tmp}/model')"),
            "demo",
        ),
        (
            ("trl-support-replay", "capture", "--model", "{model}", "--dataset", "{rows}", "--output", "{tmp}/t")
            + ("--engine", "vllm", "--top_k", "5"),
            "vllm",
        ),
        (
            ("trl-support-replay", "grpo", "--model_name_or_path", "{model}", "--dataset_name", "{data}", "--dry_run")
            + ("--reward_funcs", "accuracy_reward", "--use_cpu", "--bf16", "false", "--output_dir", "{tmp}/run"),
            "math",
        ),
        (
            ("trl-support-replay", "grpo", "--model_name_or_path", "{model}", "--dataset_name", "{data}", "--use_vllm")
            + ("--reward_funcs", "trl_support_replay.cli.demo.task.sum_reward", "--top_k", "5", "--use_cpu")
            + ("--bf16", "false", "--output_dir", "{tmp}/run", "--per_device_train_batch_size", "8"),
            "vllm",
        ),
    ],
    ids=["vllm-serve", "demo", "megatron", "demo model", "capture", "math", "grpo with vLLM"],
)
def test_what_is_missing_names_its_extra(bare, tmp_path, smollm2_path, arguments, extra):
    data = ROOT / "recipes" / "data" / "sums"
    places = {"tmp": tmp_path, "model": smollm2_path, "data": data, "rows": data / "train.jsonl"}
    code, output, errors = run(bare / arguments[0], *(a.format(**places) for a in arguments[1:]))
    assert code in (1, 2) and f"trl-support-replay[{extra}]" in errors, output + errors
    if arguments[0] != "python":
        assert "Traceback" not in errors
