"""Which kind of product a block of pairs is given."""

import numpy as np
import pytest
import torch

from trl_support_replay.scoring.blocks import SparseBlock, UnionBlock
from trl_support_replay.scoring.plan import make_plan

VOCAB = 4096


def kinds(rows, kernel="sparse"):
    offsets = np.cumsum([0, *map(len, rows)])
    ids = np.concatenate(rows).astype(np.int32)
    return [
        type(block) for block in make_plan(ids, offsets, 0, VOCAB, kernel=kernel, device=torch.device("cpu")).blocks
    ]


@pytest.mark.parametrize("size", [1000, 4000])
def test_wide_rows_share_a_product_and_one_alone_is_computed_pair_by_pair(size):
    """A product gathers or reads head rows, which pays only where several tokens use each."""
    rng = np.random.default_rng(0)
    wide = [rng.choice(VOCAB, size, replace=False) for _ in range(32)]
    alone = [[i] for i in range(20)]
    assert kinds([*alone, wide[0]]) == [SparseBlock]
    assert kinds([*alone, *wide]) == [UnionBlock]
    assert kinds([*alone, wide[0]], kernel="union") == [UnionBlock]
