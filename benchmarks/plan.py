"""Host time and host-to-device copies of one plan: this tree beside an earlier revision, in turns, in one run.

    python -m benchmarks.plan --before REVISION
    python -m benchmarks.plan --device cuda          # this tree alone, with the copies to the device

A plan says which (token, candidate) pairs are projected in which products; see `scoring/plan.py`. Each row of
`data/plan.csv` is the median of all rounds. A copy is one call of `to_device`: on a CPU it costs little, on a GPU each
is a transfer of its own.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

FILE = Path(__file__).parent / "data" / "plan.csv"
TOKENS, VOCAB = 16_384, 151_936
PAIRS = {"115k": 7, "523k": 32}
KERNELS = ("sparse", "union")


def supports(mean: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, offsets and sampled ids of `TOKENS` supports of geometric sizes; a few ids are in many of them."""
    rng = np.random.default_rng(0)
    sizes = np.minimum(rng.geometric(1 / mean, TOKENS), 400)
    rows = [np.unique((VOCAB * rng.random(size) ** 4).astype(np.int64)) for size in sizes]
    rows = [rng.permutation(row) for row in rows]
    return np.concatenate(rows), np.cumsum([0, *map(len, rows)]), np.array([row[0] for row in rows])


def measure(repeats: int, device: str = "cpu") -> dict[str, dict[str, float]]:
    """Times and counts of the package that is first on the path."""
    import torch

    from trl_support_replay.scoring import SupportCSR, candidates, plan

    torch.set_num_threads(1)
    try:
        from trl_support_replay.scoring.arguments import plan_for
    except ImportError:  # before a plan was kept, each pass validated its supports too
        from trl_support_replay.scoring import support_scores

        def plan_for(support, shard, num_vocab, kernel):
            return support_scores._plan(support, shard, num_vocab, sampled, kernel)

    copies = 0
    original = plan.to_device

    def counted(*args):
        nonlocal copies
        copies += 1
        return original(*args)

    plan.to_device = candidates.to_device = counted
    found = {}
    for name, mean in PAIRS.items():
        ids, offsets, drawn = supports(mean)
        sampled = torch.from_numpy(drawn)
        for kernel in KERNELS if device == "cpu" else ("triton", "union"):
            times = []
            for _ in range(repeats + 1):
                copies, start = 0, time.perf_counter()
                plan_for(SupportCSR.from_numpy(ids, offsets, device), None, VOCAB, kernel)
                if device == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            found[f"{name} {kernel}"] = {"pairs": len(ids), "ms": 1e3 * float(np.median(times[1:])), "copies": copies}
    return found


def measured_in(tree: Path, repeats: int) -> dict[str, dict[str, float]]:
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--repeats", str(repeats)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"Measuring in {tree} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", help="git revision to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="times that both trees are measured, in turns")
    parser.add_argument("--repeats", type=int, default=5, help="plans in each round")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="measure this tree alone, on this device")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(measure(args.repeats)))
        return
    if args.before is None and args.device is None:
        parser.error("--before names the git revision to compare with, for example HEAD~1.")
    if args.before is None:
        for name, row in measure(args.repeats, args.device).items():
            print(f"{name}: {row['pairs']} pairs, {row['ms']:.1f} ms, {row['copies']} copies")
        return
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", args.before, "trl_support_replay"], cwd=root, capture_output=True)
        if archive.returncode:
            raise SystemExit(f"--before {args.before}: {archive.stderr.decode().strip()}")
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        rounds = [
            (measured_in(Path(folder), args.repeats), measured_in(root, args.repeats)) for _ in range(args.rounds)
        ]
    with FILE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["supports", "pairs", "before_ms", "after_ms", "ratio", "before_copies", "after_copies", "cpu"])
        for name, first in rounds[0][1].items():
            before, after = (float(np.median([r[i][name]["ms"] for r in rounds])) for i in (0, 1))
            copies = [int(rounds[0][i][name]["copies"]) for i in (0, 1)]
            row = [name, int(first["pairs"]), f"{before:.1f}", f"{after:.1f}", f"{before / after:.1f}", *copies]
            writer.writerow([*row, platform.processor() or platform.machine()])
            print(*row)


if __name__ == "__main__":
    main()
