"""When is it worth fetching the candidates' rows of a sharded output head, instead of gathering all of it?

    python -m benchmarks.head_fetch                  # two gloo processes; writes benchmarks/data/head_fetch.csv
    python -m benchmarks.head_fetch --ranks 4 --hidden 1024

An FSDP2 unit that is the head alone, trained and frozen: forward and backward of the summed log-probs, by fetched rows
and by the gathered head, on the same inputs in one run. Supports are drawn so that the union of a rank's candidates
covers a given part of the vocabulary. Times are medians over repeats of the slowest rank. Bytes are what one rank
receives: of the head's rows in forward (and once more in backward, where FSDP2 gathers again), and of gradients.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

from trl_support_replay.scoring import ModelHead, SupportCSR, row_fetch, score_support

from .results import write_rows
from .scorer import DATA, processor_name

PARTS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5)
CANDIDATES = 16  # a token


class Scored(nn.Module):
    """A head alone in its unit, below a root that does the scoring, as a model would."""

    def __init__(self, vocab: int, hidden: int, trained: bool):
        super().__init__()
        self.root = nn.Parameter(torch.ones(hidden))
        self.head = nn.Linear(hidden, vocab, bias=False).requires_grad_(trained)

    def forward(self, hidden: torch.Tensor, sampled: torch.Tensor, support: SupportCSR) -> torch.Tensor:
        scores = score_support(hidden * self.root, ModelHead(self.head), sampled, support)
        assert scores.logprobs is not None
        return scores.logprobs


def run(rank: int, store: str, args: argparse.Namespace, rows: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    for trained in (True, False):
        torch.manual_seed(0)
        model = Scored(args.vocab, args.hidden, trained)
        fully_shard(model.head)
        fully_shard(model)
        for part in PARTS:
            rng = np.random.default_rng(rank)
            stretches = rng.permutation(args.vocab)[: int(part * args.vocab)]
            stretches = stretches[: len(stretches) // CANDIDATES * CANDIDATES].reshape(-1, CANDIDATES)
            tokens = max(args.tokens, len(stretches))
            ids = stretches[np.arange(tokens) % len(stretches)]
            support = SupportCSR.from_numpy(ids.reshape(-1), np.arange(tokens + 1) * CANDIDATES)
            sampled = torch.from_numpy(ids[:, 0])
            hidden = torch.randn(tokens, args.hidden)
            seconds: dict[str, list[float]] = {"fetched": [], "whole": []}
            for repeat in range(args.repeats + 1):
                for way in seconds:
                    row_fetch.FETCH_BELOW = 2.0 if way == "fetched" else 0.0
                    model.zero_grad()
                    dist.barrier()
                    started = time.perf_counter()
                    model(hidden, sampled, support).sum().backward()
                    slowest = torch.tensor(time.perf_counter() - started)
                    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                    if repeat:
                        seconds[way].append(slowest.item())
            union, others = len(np.unique(ids)), (args.ranks - 1) / args.ranks
            row_bytes = 4 * args.hidden * others
            received = {"fetched": union * row_bytes * (1 + trained), "whole": args.vocab * row_bytes * (2 + trained)}
            if rank == 0:
                medians = {way: statistics.median(values) for way, values in seconds.items()}
                for way in seconds:
                    rows.append(
                        {
                            "way": way,
                            "head": "trained" if trained else "frozen",
                            "ranks": args.ranks,
                            "vocab": args.vocab,
                            "hidden": args.hidden,
                            "tokens": tokens,
                            "union_part": round(union / args.vocab, 4),
                            "received_mib": round(received[way] / 2**20, 2),
                            "seconds_median": round(medians[way], 4),
                            "times_fetched": round(medians[way] / medians["fetched"], 2),
                            "processor": processor_name(),
                            "load_average": round(os.getloadavg()[0], 1),
                            "torch": torch.__version__,
                        }
                    )
                    print(
                        f"{rows[-1]['head']:>7} head, union {100 * rows[-1]['union_part']:5.1f} % of V, {way:>7}: "
                        f"{medians[way]:7.4f} s ({rows[-1]['times_fetched']:5.2f} x fetched), "
                        f"{rows[-1]['received_mib']:8.1f} MiB received",
                        flush=True,
                    )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--tokens", type=int, default=256, help="a rank; more where the union needs them")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=DATA / "head_fetch.csv")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = mp.Manager().list()
        mp.spawn(run, args=(os.path.join(folder, "store"), args, rows), nprocs=args.ranks)
        found = list(rows)
    write_rows(args.output, found)
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
