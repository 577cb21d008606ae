"""From which density on does a union product beat one dot product a pair?

    python -m benchmarks.scorer_crossover            # writes benchmarks/data/scorer_crossover.csv

Blocks of tokens draw their candidates from a pool of `U` ids, `K` each; the denser the block, the better for the union
product, which computes all `[n, U]` cells. The last lines say what a cell and a gathered row cost, in units of a pair:
the constants of `trl_support_replay/scoring/plan.py`. Processor time on one thread, forward and backward.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trl_support_replay.scoring import LMHead, SupportCSR, plan, score_support

from .results import write_rows
from .scorer import DATA, processor_name


def seconds(
    hidden: torch.Tensor, weight: torch.Tensor, support: SupportCSR, sampled: torch.Tensor, repeats: int
) -> float:
    """Median processor time of forward and backward, the plan made before."""

    def step() -> float:
        hidden.grad = weight.grad = None
        started = time.process_time()
        logprobs = score_support(hidden, LMHead(weight), sampled, support).logprobs
        assert logprobs is not None
        logprobs.sum().backward()
        return time.process_time() - started

    step()
    return statistics.median(step() for _ in range(repeats))


def costs(rows: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Seconds of a pair, of a cell of a union product and of a row that is gathered for one, by least squares.

    `pairs_seconds = fixed + pair * pairs` and `union_seconds = fixed + blocks * block + row * columns + cell * cells`.
    """
    pairs, columns, tokens, blocks = (
        np.array([row[name] for row in rows], dtype=float) for name in ("pairs", "columns", "block_rows", "blocks")
    )
    one = np.ones(len(rows))

    def fit(name: str, *terms: np.ndarray) -> np.ndarray:
        seconds = np.array([row[name] for row in rows])
        return np.linalg.lstsq(np.stack([one, *terms], axis=1), seconds, rcond=None)[0]

    _, pair = fit("pairs_seconds", pairs)
    _, _, row, cell = fit("union_seconds", blocks, columns, columns * tokens)
    return float(pair), float(cell), float(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1_024)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=32_768)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=DATA / "scorer_crossover.csv")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    hidden = torch.randn(args.tokens, args.hidden, requires_grad=True)
    weight = (torch.randn(args.vocab, args.hidden) / args.hidden**0.5).requires_grad_()
    rows = []
    # Blocks of several sizes tell the cost of a cell from that of a row, which they share between more tokens or fewer.
    for block, pool, size in itertools.product((8, 32, 128), (64, 256, 1_024, 4_096), (4, 16, 64, 256)):
        if size > pool:
            continue
        plan.BLOCK_ROWS = {"cpu": block}
        ids = []
        for first in range(0, args.tokens, block):
            shared = rng.choice(args.vocab, pool, replace=False)
            ids += [rng.permutation(shared)[:size] for _ in range(min(block, args.tokens - first))]
        offsets = np.arange(args.tokens + 1) * size
        sampled = torch.from_numpy(np.array([row[0] for row in ids]))
        times = {}
        for name, cost in (("pairs", np.inf), ("union", 0.0)):
            plan.CELL_COST = plan.GATHER_COST = cost
            support = SupportCSR.from_numpy(np.concatenate(ids), offsets)
            times[name] = seconds(hidden, weight, support, sampled, args.repeats)
            blocks = support.plan(0, args.vocab, "sparse").blocks
        columns = sum(len(part) for b in blocks for part in b.parts)
        rows.append(
            {
                "hidden": args.hidden,
                "block_rows": block,
                "blocks": len(blocks),
                "support": size,
                "union_a_block": round(columns / len(blocks), 1),
                "pairs": int(offsets[-1]),
                "columns": columns,
                "density": round(int(offsets[-1]) / (columns * block), 4),
                "pairs_seconds": round(times["pairs"], 5),
                "union_seconds": round(times["union"], 5),
                "processor": processor_name(),
                "torch": torch.__version__,
            }
        )
        print(
            f"n={block:<4} K={size:<4} union {rows[-1]['union_a_block']:7.1f}  density {rows[-1]['density']:.3f}  "
            f"pairs {times['pairs'] * 1e3:8.2f} ms  union {times['union'] * 1e3:8.2f} ms",
            flush=True,
        )
    pair, cell, row = costs(rows)
    print(
        f"a pair: {pair * 1e6:.2f} us; a cell of a union product: {cell / pair:.4f} pairs; "
        f"a gathered row: {row / pair:.2f} pairs"
    )
    write_rows(args.output, rows)
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
