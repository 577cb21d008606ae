"""How fast and how large is the scorer, against TRL's fused head, pair projections and a bare dense product?

    python -m benchmarks.scorer --output runs/scorer.csv       # one size; a few minutes
    python -m benchmarks.scorer --vocab 49152 151936 --hidden 1024 4096 --supports realistic k20 k64 wide --repeats 1
    python -m benchmarks.scorer --device cuda --output benchmarks/data/scorer_cuda.csv

Forward and backward of the summed log-probs, on the same inputs, in one run; `benchmarks/scorer_baselines.py` has the
contenders. `replay` includes the making of its plan from host arrays, which a trainer does once a batch. A trained head
needs the gradient of its weight, `[V, H]` in every contender; a frozen one (LoRA) does not. `replay_read` is a trained
head whose gradient is also read once (its norm, as gradient clipping does): the scorer leaves it to the operating
system to clear the pages that it does not touch, and this shows what the rest of a step pays for that. With huge pages,
which hold 512 rows of 1,024 values, hardly any page stays untouched.

Supports: `realistic` has 47 % singletons, median 2, mean about 8, 99th percentile about 109; `k20` and `k64` have that
many ids in every row; `wide` has one row of 20,000 ids among singletons; `p95` is like SmolLM2's nucleus of 0.95 at
temperature 1: median 157, mean about 490, largest 9,201. Ids are Zipf-distributed, or uniform (`--ids
uniform`), where no two tokens share candidates.

Times are medians, of the wall clock and of the processor time of all threads; the latter with `--threads 1` is what can
be trusted on a machine that others use. Memory is the peak of the resident set above the inputs, each contender in a
process of its own; pages of the weight's gradient that a contender left untouched count too, since an optimizer touches
them and their number depends on the size of a page. On a GPU (`--device cuda`) memory is what the allocator reports.
The file is written whole at the end; while it lasts, rows go to one beside it that ends in `.partial`.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from trl_support_replay.scoring import LMHead, SupportCSR, score_support

from .scorer_baselines import BASELINES, DENSE

DATA = Path(__file__).parent / "data"
SUPPORTS = ("realistic", "k20", "k64", "wide", "p95")
CONTENDERS = ("replay", "replay_read", *BASELINES)


def realistic_sizes(num_tokens: int, rng: np.random.Generator) -> np.ndarray:
    """`[N]` support sizes: 47 % ones, median 2, mean about 8, 99th percentile about 109."""
    sizes = np.ones(num_tokens, np.int64)
    many = rng.random(num_tokens) >= 0.47
    sizes[many] = 2 + np.floor(np.exp(rng.normal(1.1, 1.72, many.sum()))).astype(np.int64)
    return np.minimum(sizes, 500)


def make_sizes(kind: str, num_tokens: int, rng: np.random.Generator) -> np.ndarray:
    """`[N]` support sizes of a kind among `SUPPORTS`."""
    if kind == "realistic":
        return realistic_sizes(num_tokens, rng)
    if kind == "p95":
        return np.clip(np.exp(rng.normal(np.log(157), 1.52, num_tokens)), 1, 9_201).astype(np.int64)
    sizes = np.ones(num_tokens, np.int64)
    if kind == "wide":
        sizes[num_tokens // 2] = 20_000
    else:
        sizes[:] = int(kind[1:])
    return sizes


def make_supports(
    sizes: np.ndarray, vocab: int, rng: np.random.Generator, law: str = "zipf"
) -> tuple[np.ndarray, np.ndarray]:
    """Candidates without repetition in a row, the sampled one first: ids `[nnz]` and offsets `[N + 1]`."""
    rank_of = rng.permutation(vocab)
    rows = []
    for size in sizes:
        row = np.zeros(0, np.int64)
        if law == "zipf":
            row = np.unique(np.minimum(rng.zipf(1.2, 4 * size + 8), vocab) - 1)
            row = row[: 4 * size]
        while len(row) < size:
            row = np.unique(np.concatenate([row, rng.integers(0, vocab, size)]))
        rows.append(rank_of[rng.permutation(row)[:size]])
    return np.concatenate(rows).astype(np.int64), np.concatenate([[0], np.cumsum(sizes)])


class Case:
    """Inputs that all contenders share."""

    def __init__(self, args: argparse.Namespace, trained: bool):
        rng = np.random.default_rng(0)
        generator = torch.Generator().manual_seed(0)
        self.device = torch.device(args.device)
        self.hidden = torch.randn(args.tokens, args.hidden, generator=generator).to(self.device).requires_grad_()
        self.weight = (torch.randn(args.vocab, args.hidden, generator=generator) / args.hidden**0.5).to(self.device)
        self.weight.requires_grad_(trained)
        sizes = make_sizes(args.supports, args.tokens, rng)
        self.ids, self.offsets = make_supports(sizes, args.vocab, rng, args.ids)
        self.on_device = torch.from_numpy(self.ids).to(self.device), torch.from_numpy(self.offsets).to(self.device)
        self.sampled = torch.from_numpy(self.ids[self.offsets[:-1]]).to(self.device)

    def forward(self, contender: str) -> torch.Tensor:
        if contender in BASELINES:
            return BASELINES[contender](self.hidden, self.weight, self.sampled, *self.on_device)
        support = SupportCSR.from_numpy(self.ids, self.offsets, device=self.device)
        scores = score_support(self.hidden, LMHead(self.weight), self.sampled, support)
        assert scores.logprobs is not None
        return scores.logprobs

    def step(self, contender: str) -> None:
        self.hidden.grad = self.weight.grad = None
        self.forward(contender).sum().backward()
        if contender == "replay_read" and self.weight.grad is not None:
            self.weight.grad.norm()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None


def start_peak() -> int:
    """Bytes resident now; from here on `peak_bytes` looks for a new peak (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """Largest resident set since `start_peak`, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def untouched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of `tensor` in pages that nobody has written to so far. Writes to all of them (Linux)."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    tensor.add_(0)
    return max(resident() - before, 0)


def measure(case: Case, contender: str) -> tuple[float, float]:
    """Seconds of the wall clock, and of processor time, of one step."""
    case.clear()
    wall, processor = time.perf_counter(), time.process_time()
    case.step(contender)
    return time.perf_counter() - wall, time.process_time() - processor


def peak_memory(args: argparse.Namespace, contender: str, trained: bool) -> float:
    """MiB above the inputs, in a new process."""
    command = [sys.executable, "-m", "benchmarks.scorer", "--child", contender, "--trained", str(int(trained))]
    for name in ("vocab", "hidden", "tokens", "supports", "ids", "threads", "device"):
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["mib"]


def child(args: argparse.Namespace) -> None:
    for name in ("vocab", "hidden", "supports"):
        setattr(args, name, getattr(args, name)[0])
    case = Case(args, bool(args.trained))
    if case.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        case.step(args.child)
        print(json.dumps({"mib": (torch.cuda.max_memory_allocated() - before) / 2**20}))
        return
    if args.child == "trl":
        import trl.trainer.utils  # noqa: F401  (its import is not what is measured)
    before = start_peak()
    case.step(args.child)
    peak = peak_bytes() - before
    untouched = 0 if case.weight.grad is None else untouched_bytes(case.weight.grad)
    print(json.dumps({"mib": (peak + untouched) / 2**20}))


def processor_name(device: str = "cpu") -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def run_table(args: argparse.Namespace) -> Iterator[dict]:
    """One row for each size, kind of support, head and contender."""
    dense: dict[tuple, dict[str, float]] = {}
    table = itertools.product(args.vocab, args.hidden, args.supports, (True, False))
    for vocab, hidden, supports, trained in table:
        one = argparse.Namespace(**vars(args) | {"vocab": vocab, "hidden": hidden, "supports": supports})
        case = Case(one, trained)
        sizes = np.diff(case.offsets)
        values = {name: case.forward(name).detach() for name in ("replay", "chunks")}
        torch.testing.assert_close(values["replay"], values["chunks"], atol=1e-4, rtol=1e-4)
        base: dict[str, float] = {}
        for contender in CONTENDERS:
            key = (vocab, hidden, trained, contender)
            if contender not in args.contenders or (contender == "replay_read" and not trained):
                continue
            if key not in dense:
                case.step(contender)  # warm up
                repeats = args.repeats if contender in DENSE else 3 * args.repeats
                wall, processor = zip(*(measure(case, contender) for _ in range(repeats)), strict=True)
                case.clear()
                figures = {
                    "seconds_median": round(statistics.median(wall), 5),
                    "seconds_min": round(min(wall), 5),
                    "seconds_max": round(max(wall), 5),
                    "processor_seconds_median": round(statistics.median(processor), 5),
                    "peak_mib": round(peak_memory(one, contender, trained), 1),
                }
            else:
                figures = dense[key]
            if contender in DENSE:
                dense[key] = figures
            base = base or figures
            ratio = figures["processor_seconds_median"] / base["processor_seconds_median"]
            row = {
                "contender": contender,
                "head": "trained" if trained else "frozen",
                "vocab": vocab,
                "hidden": hidden,
                "tokens": args.tokens,
                "supports": supports,
                "ids": args.ids,
                "support_mean": round(float(sizes.mean()), 2),
                "support_median": float(np.median(sizes)),
                "support_p99": float(np.quantile(sizes, 0.99)),
                "singletons": round(float((sizes == 1).mean()), 3),
                **figures,
                "times_replay": round(figures["seconds_median"] / base["seconds_median"], 2),
                "processor_times_replay": round(ratio, 2),
                "threads": args.threads,
                "device": args.device,
                "processor": processor_name(args.device),
                "torch": torch.__version__,
            }
            print(
                f"V={vocab:<7} H={hidden:<5} {supports:>9} {row['head']:>7} head  {contender:>11}: "
                f"{figures['seconds_median']:9.4f} s, processor {figures['processor_seconds_median']:9.4f} s "
                f"({ratio:7.1f} x replay)  {figures['peak_mib']:9.1f} MiB",
                flush=True,
            )
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[151_936])
    parser.add_argument("--hidden", type=int, nargs="+", default=[1_024])
    parser.add_argument("--tokens", type=int, default=2_048)
    parser.add_argument("--supports", nargs="+", choices=SUPPORTS, default=["realistic"])
    parser.add_argument("--ids", choices=("zipf", "uniform"), default="zipf", help="which ids are likely")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed runs of the dense contenders; the others get three times as many"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=DATA / "scorer.csv")
    parser.add_argument("--child", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--trained", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if "replay" not in args.contenders:
        parser.error("--contenders: replay is what the others are compared with, so it has to be among them")
    if args.child:
        child(args)
        return
    args.output.parent.mkdir(exist_ok=True)
    partial = args.output.with_suffix(".csv.partial")
    with open(partial, "w", newline="") as file:
        for number, row in enumerate(run_table(args)):
            writer = csv.DictWriter(file, row)
            if number == 0:
                writer.writeheader()
            writer.writerow(row)
            file.flush()
    partial.replace(args.output)
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
