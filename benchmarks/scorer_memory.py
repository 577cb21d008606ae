"""Does the scorer ever hold anything of size N·V, or N·max(size)·H? Watches every tensor that is made.

    python -m benchmarks.scorer_memory              # N=2,048, H=1,024, V=151,936; exits 1 when a bound is broken

Every operation of forward and backward passes a dispatch mode that notes the largest tensor it returns, apart from the
weight gradient `[V, H]`, which belongs to the optimizer; and the resident set is compared before and after.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .scorer import Case, peak_bytes, start_peak


class LargestTensor(TorchDispatchMode):
    """Keeps the sizes of the tensors that operations return, except those of `ignore` elements."""

    def __init__(self, ignore: int):
        super().__init__()
        self.ignore = ignore
        self.largest = 0
        self.name = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if not isinstance(leaf, torch.Tensor) or leaf.numel() == self.ignore:
                continue  # the weight, a view of it, or its gradient
            # A sparse tensor holds its values, not its shape.
            held = leaf.numel() if leaf.layout == torch.strided else leaf.values().numel()
            if held > self.largest:
                self.largest, self.name = held, f"{func} {tuple(leaf.shape)}"
        return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1_024)
    parser.add_argument("--tokens", type=int, default=2_048)
    args = parser.parse_args()
    args.device, args.supports, args.ids = "cpu", "realistic", "zipf"
    failed = False
    for trained in (True, False):
        case = Case(args, trained)
        largest_support = int(np.diff(case.offsets).max())
        bounds = {
            "N·V": args.tokens * args.vocab,
            "N·max(size)·H": args.tokens * largest_support * args.hidden,
        }
        before = start_peak()
        with LargestTensor(case.weight.numel()) as seen:
            case.step("replay")
        grown = peak_bytes() - before
        gradient = case.weight.numel() * 4 if trained else 0
        extra = max(grown - gradient, 0)
        print(f"{'trained' if trained else 'frozen'} head, largest support {largest_support}:")
        print(f"  largest tensor made: {seen.largest:,} elements ({seen.name})")
        print(f"  resident set grew by {grown / 2**20:.0f} MiB, of which the weight gradient {gradient / 2**20:.0f}")
        for name, elements in bounds.items():
            ok = seen.largest < elements / 8 and extra < elements * 4 / 8
            failed |= not ok
            print(
                f"  {name} = {elements:,} elements ({elements * 4 / 2**20:,.0f} MiB): {'never held' if ok else 'HELD'}"
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
