"""Runs both variants of the demo, shows their progress, and reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..environment import report
from .model import fetch_smollm2
from .report import plot, print_table, write_summary
from .settings import SETTINGS

_TITLES = {"replay": "with support replay", "stock": "stock TRL"}


class DemoError(RuntimeError):
    """A variant of the demo failed."""


def run_demo(steps: int = 20, output: str | os.PathLike[str] = "runs/demo", models: str = "models") -> int:
    """Train SmolLM2-135M-Instruct with replay, then the same steps without, and compare.

    Args:
        steps: optimizer steps of each variant.
        output: folder for `summary.json`, `demo.png` and the logs.
        models: folder that the model is unpacked into.

    Returns:
        Exit status: 0, or 130 when interrupted, after reporting what was measured until then.

    Raises:
        DemoError: a variant failed; its log is named.
    """
    if steps < 1:
        raise DemoError(f"steps={steps}: at least one optimizer step is needed.")
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    model = Path(models) / "SmolLM2-135M-Instruct"
    if not model.exists():
        print(f"==> Unpacking {model}, once", flush=True)
    fetch_smollm2(model)
    print(f"==> {steps} GRPO steps on sums, with support replay and without; an engine takes half a minute to start")

    measured: dict[str, list[dict[str, Any]]] = {"replay": [], "stock": []}
    status = 0
    try:
        for variant, rows in measured.items():
            _train(variant, str(model), steps, folder, rows)
    except KeyboardInterrupt:
        status = 130
        print("\n==> Interrupted; reporting what was measured so far")
    summary = write_summary(
        folder / "summary.json",
        measured,
        SETTINGS | {"steps": steps, "model": "SmolLM2-135M-Instruct"},
        {package.name: package.version for package in report().packages},
    )
    print_table(summary)
    if any(measured.values()):
        plot(folder / "demo.png", measured)
    print(f"==> {folder / 'summary.json'} and {folder / 'demo.png'}")
    return status


def _train(variant: str, model: str, steps: int, folder: Path, rows: list[dict[str, Any]]) -> None:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    command = [sys.executable, "-m", "trl_support_replay.demo.variant", variant, "--model", model]
    command += ["--steps", str(steps), "--output", str(folder / variant)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1"}
    log = folder / f"{variant}.log"
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with open(log, "w") as file, Progress(*columns) as progress:
        task = progress.add_task(_TITLES[variant], total=steps, figures="starting the engine")
        # A session of its own: Ctrl-C reaches this process, which then stops the variant and reports.
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment, start_new_session=True
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if not line.startswith("@step "):
                    file.write(line)
                    continue
                row = json.loads(line.removeprefix("@step "))
                rows.append(row)
                figures = f"ratio {row['importance_ratio_mean']:.3f}  reward {row['reward']:.2f}"
                progress.update(task, completed=row["step"], figures=figures)
            code = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    if code != 0:
        tail = "".join(log.read_text().splitlines(keepends=True)[-15:])
        raise DemoError(f"The variant '{variant}' failed with exit status {code}; the end of {log}:\n{tail}")
