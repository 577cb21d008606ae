"""States, heads and supports that tests of the scorer share."""

from __future__ import annotations

import numpy as np
import torch

FAST = ("union", "sparse")
ALL = ("reference", *FAST)


def head_and_states(num_tokens=12, width=8, vocab=50, seed=0, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(num_tokens, width, generator=generator) * scale).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator).to(dtype).requires_grad_()
    return hidden, weight


def random_rows(num_tokens, vocab, seed=0, max_size=9, min_size=1):
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(vocab)[: rng.integers(min_size, max_size + 1)].tolist() for _ in range(num_tokens)]
    return [int(rng.choice(row)) for row in rows], rows
