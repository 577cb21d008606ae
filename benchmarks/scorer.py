"""How fast and how large is the scorer, against TRL's fused head and a plain gather of weight rows?

    python -m benchmarks.scorer                     # V=151,936, H=1,024, N=2,048; writes benchmarks/data/scorer.csv
    python -m benchmarks.scorer --vocab 49152 --tokens 512 --repeats 5

Forward and backward of the summed log-probs, on the same inputs, in one run, the contenders in turn. TRL's head is
called as its GRPO trainer calls it (log-probs and entropy, all tokens, chunks of its own size). `gather` is the
straightforward candidate path: `weight[ids]` for every pair of token and candidate, a batched dot product, and an
`index_add` for the weight gradient. A trained head needs the gradient of the weight, which is a zero-filled
`[V, H]` tensor in every contender; a frozen one (LoRA) does not.

Supports: 47 % singletons, median 2, mean 8, 99th percentile 82. Times are medians; memory is the peak of the resident
set above what the inputs take, each contender in a process of its own. Runs on a GPU as it stands (`--device cuda`),
where memory is what the allocator reports.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from trl_support_replay.scoring import LMHead, SupportCSR, score_support

DATA = Path(__file__).parent / "data"
CONTENDERS = ("replay", "gather", "trl")


def realistic_sizes(num_tokens: int, rng: np.random.Generator) -> np.ndarray:
    """`[N]` support sizes: 47 % ones, median 2, mean about 8, 99th percentile about 82."""
    sizes = np.ones(num_tokens, np.int64)
    many = rng.random(num_tokens) >= 0.47
    sizes[many] = 2 + np.floor(np.exp(rng.normal(1.1, 1.72, many.sum()))).astype(np.int64)
    return np.minimum(sizes, 500)


def make_supports(sizes: np.ndarray, vocab: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Zipf-distributed candidates without repetition in a row: ids `[nnz]`, offsets `[N + 1]`, sampled ids `[N]`."""
    rank_of = rng.permutation(vocab)
    rows = []
    for size in sizes:
        row = np.unique(np.minimum(rng.zipf(1.2, 4 * size + 8), vocab) - 1)[: 4 * size]
        while len(row) < size:
            row = np.unique(np.concatenate([row, rng.integers(0, vocab, size)]))
        rows.append(rank_of[rng.permutation(row)[:size]])
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    ids = np.concatenate(rows).astype(np.int64)
    return ids, offsets, ids[offsets[:-1]]


class Case:
    """Inputs that all contenders share."""

    def __init__(self, args: argparse.Namespace, trained: bool):
        rng = np.random.default_rng(0)
        generator = torch.Generator().manual_seed(0)
        self.device = torch.device(args.device)
        self.hidden = torch.randn(args.tokens, args.hidden, generator=generator).to(self.device).requires_grad_()
        self.weight = (torch.randn(args.vocab, args.hidden, generator=generator) / args.hidden**0.5).to(self.device)
        self.weight.requires_grad_(trained)
        self.ids, self.offsets, sampled = make_supports(realistic_sizes(args.tokens, rng), args.vocab, rng)
        self.sampled = torch.from_numpy(sampled).to(self.device)

    def replay(self) -> torch.Tensor:
        support = SupportCSR.from_numpy(self.ids, self.offsets, device=self.device)
        scores = score_support(self.hidden, LMHead(self.weight), self.sampled, support)
        assert scores.logprobs is not None
        return scores.logprobs

    def gather(self) -> torch.Tensor:
        ids = torch.from_numpy(self.ids).to(self.device)
        rows = torch.repeat_interleave(torch.from_numpy(np.diff(self.offsets)).to(self.device))
        logits = (self.weight[ids] * self.hidden[rows]).sum(-1)
        n = len(self.sampled)
        highest = torch.full((n,), -torch.inf, device=self.device)
        highest = highest.scatter_reduce(0, rows, logits.detach(), "amax")
        total = torch.zeros(n, device=self.device).index_add(0, rows, (logits - highest[rows]).exp())
        first = torch.from_numpy(self.offsets[:-1]).to(self.device)
        return logits[first] - highest - total.log()

    def trl(self) -> torch.Tensor:
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE, _ChunkedLogProbFunction

        outputs = _ChunkedLogProbFunction.apply(
            self.hidden, self.weight, None, self.sampled, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0,
            ("log_probs", "entropy"),
        )  # fmt: skip
        return outputs[0]

    def step(self, contender: str) -> None:
        self.hidden.grad = self.weight.grad = None
        forward: Callable[[], torch.Tensor] = getattr(self, contender)
        forward().sum().backward()
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def start_peak() -> int:
    """Bytes resident now; from here on `peak_bytes` looks for a new peak (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """Largest resident set since `start_peak`, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def seconds(case: Case, contender: str) -> float:
    started = time.perf_counter()
    case.step(contender)
    return time.perf_counter() - started


def peak_memory(args: argparse.Namespace, contender: str, trained: bool) -> float:
    """MiB above the inputs, in a new process."""
    command = [sys.executable, "-m", "benchmarks.scorer", "--child", contender, "--trained", str(int(trained))]
    for name in ("vocab", "hidden", "tokens", "threads", "device"):
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["mib"]


def child(args: argparse.Namespace) -> None:
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
    print(json.dumps({"mib": (peak_bytes() - before) / 2**20}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1_024)
    parser.add_argument("--tokens", type=int, default=2_048)
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed runs of TRL's head; the others get three times as many"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=DATA / "scorer.csv")
    parser.add_argument("--child", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--trained", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.child:
        child(args)
        return

    rows = []
    for trained in (True, False):
        case = Case(args, trained)
        sizes = np.diff(case.offsets)
        times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        for contender in CONTENDERS:
            case.step(contender)  # warm up
        values = {name: getattr(case, name)().detach() for name in CONTENDERS}
        torch.testing.assert_close(values["replay"], values["gather"], atol=1e-4, rtol=1e-4)
        for _ in range(args.repeats):
            times["trl"].append(seconds(case, "trl"))
            for _ in range(3):
                times["replay"].append(seconds(case, "replay"))
                times["gather"].append(seconds(case, "gather"))
        del case
        base = statistics.median(times["replay"])
        memory = {name: peak_memory(args, name, trained) for name in CONTENDERS}
        for name in CONTENDERS:
            median = statistics.median(times[name])
            rows.append(
                {
                    "contender": name,
                    "head": "trained" if trained else "frozen",
                    "vocab": args.vocab,
                    "hidden": args.hidden,
                    "tokens": args.tokens,
                    "support_mean": round(float(sizes.mean()), 2),
                    "support_median": float(np.median(sizes)),
                    "support_p99": float(np.quantile(sizes, 0.99)),
                    "singletons": round(float((sizes == 1).mean()), 3),
                    "seconds_median": round(median, 5),
                    "seconds_min": round(min(times[name]), 5),
                    "seconds_max": round(max(times[name]), 5),
                    "times_replay": round(median / base, 2),
                    "peak_mib": round(memory[name], 1),
                    "threads": args.threads,
                    "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "cpu",
                    "torch": torch.__version__,
                }
            )
            print(
                f"{rows[-1]['head']:>8} head  {name:>7}: {median:9.4f} s  {rows[-1]['times_replay']:8.1f} x replay  "
                f"{memory[name]:9.1f} MiB",
                flush=True,
            )
    args.output.parent.mkdir(exist_ok=True)
    with open(args.output, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
