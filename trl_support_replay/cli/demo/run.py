"""Runs both variants of the demo, shows their progress, and reports."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...libraries.environment import check_supported, report
from ...settings.preflight import check_output_dir
from .model import fetch_smollm2
from .report import GAP, RATIO, plot, print_table, write_summary
from .settings import SETTINGS, TASKS

_TITLES = {"replay": "with support replay", "stock": "stock TRL"}


class DemoError(RuntimeError):
    """A variant of the demo failed."""


def run_demo(
    task: str = "words", steps: int = 20, output: str | os.PathLike[str] = "runs/demo", models: str = "models"
) -> int:
    """Train SmolLM2-135M-Instruct with replay, then the same steps without, and compare.

    Args:
        task: one of `TASKS`.
        steps: optimizer steps of each variant.
        output: folder for `summary.json`, `demo.png` and the logs.
        models: folder that the model is unpacked into.

    Returns:
        Exit status: 0, or 130 when interrupted, after reporting what was measured until then.

    Raises:
        InputError: `output` cannot be written.
        UnsupportedVersionError: vLLM is missing.
        DemoError: matplotlib is missing; or a variant failed: its log is named, and what was measured until then is
            reported.
    """
    folder = Path(output)
    check_output_dir(folder)
    check_supported("vllm")
    if find_spec("matplotlib") is None:  # before training, not after it
        raise DemoError("The demo's plot needs matplotlib. Run: pip install 'trl-support-replay[demo]'")
    model = Path(models) / "SmolLM2-135M-Instruct"
    if not model.exists():
        print(f"==> Unpacking {model}, once", flush=True)
    fetch_smollm2(model)
    print(f"==> {steps} GRPO steps on sums, with support replay and without; an engine takes half a minute to start")

    measured: dict[str, list[dict[str, Any]]] = {"replay": [], "stock": []}
    status, failure = 0, None
    try:
        with _terminated_as_interrupted():
            for variant, rows in measured.items():
                _train(variant, task, model, steps, folder, rows)
    except KeyboardInterrupt:
        status = 130
        print("\n==> Interrupted; reporting what was measured so far")
    except DemoError as error:
        failure = error
    summary = write_summary(
        folder / "summary.json",
        measured,
        SETTINGS | TASKS[task].sampling | {"task": task, "steps": steps, "model": "SmolLM2-135M-Instruct"},
        {package.name: package.version for package in report().packages},
    )
    print_table(summary)
    plot(folder / "demo.png", measured)
    print(f"==> {folder / 'summary.json'} and {folder / 'demo.png'}")
    if failure is not None:
        raise failure
    return status


def _train(variant: str, task: str, model: Path, steps: int, folder: Path, rows: list[dict[str, Any]]) -> None:
    command = [sys.executable, "-m", "trl_support_replay.cli.demo.variant", variant, "--task", task]
    command += ["--model", str(model), "--steps", str(steps), "--output", str(folder / variant)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    log, metrics = folder / f"{variant}.log", folder / variant / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    with open(log, "w") as file:
        # In its own session: Ctrl-C reaches only this process, which then stops the variant and reports.
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code = None
            while code is None:
                code = process.poll()  # before the last look at what was logged
                for row in _logged(metrics)[len(rows) :]:
                    rows.append(row)
                    figures = f"ratio {row[RATIO]:.3f}  gap {row[GAP]:.1e}  reward {row['reward']:.2f}"
                    print(f"{_TITLES[variant]}: step {row['step']} of {steps}  {figures}", flush=True)
                time.sleep(0.2)
        finally:
            # Stops the engine's processes too, also when the variant has ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        tail = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-15:])
        raise DemoError(f"The variant '{variant}' failed with exit status {code}; the end of {log}:\n{tail}")


def _logged(metrics: Path) -> list[dict[str, Any]]:
    """What each step has logged so far; a line that is being written is left for the next look."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if "reward" in row]


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Lets SIGTERM, which schedulers send, do what Ctrl-C does."""

    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
