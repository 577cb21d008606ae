"""Everything that only a GPU can show, in one command, without a network.

    python -m benchmarks.gpu              # on a machine with CUDA; at most 30 minutes
    python -m benchmarks.gpu --dry-run    # what would run, how long, and what is missing here
    python -m benchmarks.gpu --cpu        # the parts that a CPU can run: the kernels by Triton's interpreter, a step

It works from the source tree, without installing. A part whose packages are missing is skipped and named. Each part
runs in a process of its own; its output goes to a log and its data to a CSV file in the folder of results, and
`gpu.md` there has one table of all parts. It has not been run on a GPU yet.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = "models/SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Part:
    """One command.

    Attributes:
        name: also that of its log, and of its CSV file where it writes one.
        shows: what it shows.
        command: what stands behind `python -m`; `{out}` is the folder of results.
        minutes: how long it takes at most.
        needs: packages beside torch and transformers, and files of the source tree.
        on_cpu: the command with which a CPU runs it; `None` where none can.
    """

    name: str
    shows: str
    command: str
    minutes: int
    needs: tuple[str, ...] = ()
    on_cpu: str | None = None


PARTS = (
    Part(
        "kernels",
        "Triton kernels equal the reference in values and gradients: float64, float32, bfloat16, float16, odd shapes",
        "tests.scoring.triton_cases --device cuda",
        2,
        ("triton",),
        "tests.scoring.triton_cases",
    ),
    Part(
        "scorer",
        "time and memory of the scorer, beside TRL's head and a dense product",
        "benchmarks.scorer --device cuda --vocab 151936 --hidden 1024 4096 --supports realistic k20 k64 wide p95 "
        "--output {out}/scorer.csv",
        8,
        ("trl",),
    ),
    Part(
        "plan", "time of a plan and its copies", "benchmarks.plan --device cuda", 1, (), "benchmarks.plan --device cpu"
    ),
    Part(
        "step",
        "a training step in bfloat16 with a random model, beside TRL's own",
        "benchmarks.step --device cuda --bf16 --output {out}/step.csv",
        4,
        ("trl",),
        "benchmarks.step --bf16 --cases chars --steps 3 --output {out}/step.csv",
    ),
    Part(
        "capture",
        "what each capture costs vLLM",
        f"benchmarks.capture {MODEL} --tokens 64 --output {{out}}/capture.csv",
        4,
        ("vllm", MODEL),
    ),
    Part("mask", "vLLM's own sampling mask holds every support, at any width", "benchmarks.native_mask", 3, ("vllm",)),
)


def missing(part: Part) -> list[str]:
    """What `part` needs and this machine lacks."""
    return [name for name in part.needs if not (find_spec(name) or (ROOT / name).exists())]


def run(part: Part, command: str, out: Path, device: str) -> tuple[str, float]:
    """Run a part; its state and its seconds."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    start = time.monotonic()
    with (out / f"{part.name}.log").open("w") as log:
        try:
            done = subprocess.run(
                [sys.executable, "-m", *command.format(out=out).split()],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=120 * part.minutes,
            )
            state = "passed" if done.returncode == 0 else f"failed with exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            state = f"stopped after {2 * part.minutes} minutes"
    return state, time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="only say what would run")
    parser.add_argument("--cpu", action="store_true", help="run the parts that a CPU can run")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="these parts alone")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "gpu", help="folder of results")
    args = parser.parse_args()
    import torch

    if not (args.cpu or args.dry_run or torch.cuda.is_available()):
        parser.error("PyTorch finds no CUDA device here. --dry-run says what would run, --cpu runs what a CPU can.")
    device = "cpu" if args.cpu or not torch.cuda.is_available() else "cuda"
    machine = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    rows, failed = [], False
    args.output.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        command = part.on_cpu if args.cpu else part.command
        if args.parts and part.name not in args.parts:
            continue
        lacking = missing(part)
        if command is None:
            state, seconds = "needs a GPU", 0.0
        elif lacking:
            state, seconds = f"skipped: {', '.join(lacking)} is not here", 0.0
        elif args.dry_run:
            state, seconds = f"would run for up to {part.minutes} minutes", 0.0
        else:
            print(f"==> {part.name}: {part.shows} (up to {part.minutes} minutes)", flush=True)
            state, seconds = run(part, command, args.output.resolve(), device)
        failed |= state.startswith(("failed", "stopped"))
        print(f"{part.name:8s} {state}" + (f", {seconds:.0f} s" if seconds else ""), flush=True)
        rows.append(f"| {part.name} | {part.shows} | {state} | {seconds:.0f} | `python -m {command or part.command}` |")
    head = [f"# {machine}, PyTorch {torch.__version__}", "", "| part | shows | state | seconds | command |"]
    if not args.dry_run:
        (args.output / "gpu.md").write_text("\n".join([*head, "|---|---|---|---|---|", *rows]) + "\n")
        print(f"==> {args.output / 'gpu.md'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
