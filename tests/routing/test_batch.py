"""`RouteBatch`: where each sample's routes stand, and what is padding."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_support_replay.routing import RouteBatch
from trl_support_replay.traces.routes import RoutedExperts, RoutesError

LAYERS, TOP_K = (1, 3), 2


@st.composite
def padded_batches(draw):
    """Samples of several lengths at several places in a batch, some tokens uncaptured."""
    num_experts = draw(st.sampled_from([4, 300, 70_000]))
    width = draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    samples, starts = [], []
    for _ in range(draw(st.integers(1, 3))):
        starts.append(draw(st.integers(0, width)))
        length = draw(st.integers(0, width - starts[-1]))
        experts = rng.permuted(np.arange(min(num_experts, 50)) * (num_experts // min(num_experts, 50)))
        experts = np.stack(
            [[rng.permutation(experts)[:TOP_K] for _ in LAYERS] for _ in range(length)] or [[[0, 1]] * 2]
        )
        captured = rng.random(length) < 0.7
        samples.append(RoutedExperts(experts[:length], num_experts=num_experts, layers=LAYERS, captured=captured))
    return samples, starts, width


@given(padded_batches())
def test_from_samples_places_every_token(case):
    samples, starts, width = case
    batch = RouteBatch.from_samples(samples, starts, width)
    assert batch.layers == LAYERS and batch.num_experts == samples[0].num_experts
    for i, (routes, start) in enumerate(zip(samples, starts, strict=True)):
        for position in range(width):
            token = position - start
            used = batch.experts[i, position].to(torch.int64).tolist()
            if not 0 <= token < len(routes):
                assert batch.padding[i, position] and not batch.captured[i, position]
                assert used == [[0, 1]] * len(LAYERS)
            else:
                assert not batch.padding[i, position]
                assert bool(batch.captured[i, position]) == bool(routes.captured[token])
                assert not routes.captured[token] or used == routes.to_int64()[token].tolist()
    assert batch.num_captured == sum(int(routes.captured.sum()) for routes in samples)
    assert batch.num_uncaptured == sum(int((~routes.captured).sum()) for routes in samples)


@given(padded_batches(), st.integers(1, 3))
def test_split_gives_the_rows_in_order(case, size):
    samples, starts, width = case
    parts = RouteBatch.from_samples(samples, starts, width).split(size)
    assert len(parts) == -(-len(samples) // size)
    for i, part in enumerate(parts):
        rows = slice(i * size, (i + 1) * size)
        alone = RouteBatch.from_samples(samples[rows], starts[rows], width)
        for name in ("experts", "captured", "padding"):
            assert torch.equal(getattr(part, name), getattr(alone, name))
        assert (part.num_captured, part.num_uncaptured) == (alone.num_captured, alone.num_uncaptured)
        assert (part.layers, part.num_experts) == (alone.layers, alone.num_experts)


def routes(*rows, num_experts=4):
    return RoutedExperts(np.array(rows, dtype=np.int64)[:, None], num_experts=num_experts)


@pytest.mark.parametrize(
    ("samples", "starts", "width", "message"),
    [
        ([routes([0, 1], [2, 3])], [2], 3, "sample 0: 2 tokens from position 2 do not fit a width 3"),
        ([routes([0, 1])], [-1], 3, "sample 0: 1 tokens from position -1"),
        ([routes([0, 1])], [0, 1], 3, "1 samples with routes for 2 starting positions"),
        ([], [], 3, "0 samples"),
        ([routes([0, 1]), routes([0, 1], num_experts=5)], [0, 0], 3, "sample 1: recorded experts 5, expected 4"),
    ],
)
def test_samples_that_do_not_fit_are_refused(samples, starts, width, message):
    with pytest.raises(RoutesError, match=message):
        RouteBatch.from_samples(samples, starts, width)


def test_raw_tensors_are_checked():
    good = torch.tensor([[[[0, 1]], [[3, 2]]]])
    assert RouteBatch(good).num_experts == 4
    with pytest.raises(RoutesError, match=r"shape \(1, 2, 1\)"):
        RouteBatch(good[..., 0])
    with pytest.raises(RoutesError, match="float32 are not integers"):
        RouteBatch(good.float())
    with pytest.raises(RoutesError, match=r"captured mask is torch.bool \(1, 3\), not bool \(1, 2\)"):
        RouteBatch(good, torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(RoutesError, match="padding mask is torch.int64"):
        RouteBatch(good, good[:, :, 0, 0] > 0, torch.ones(1, 2, dtype=torch.int64))
    with pytest.raises(RoutesError, match="1 positions are both captured and padding"):
        RouteBatch(good, torch.tensor([[True, True]]), torch.tensor([[True, False]]))
    with pytest.raises(RoutesError, match="Expert id -1 at a captured position"):
        RouteBatch(good - 1)


def test_an_expert_twice_is_refused_at_captured_positions_only():
    zeros = torch.zeros(2, 3, 2, 2, dtype=torch.uint8)
    zeros[..., 1] = 1
    zeros[1, 2, 1] = 0
    with pytest.raises(RoutesError, match=r"sample 1, position 2, layer column 1: one expert twice in \[0, 0\]"):
        RouteBatch(zeros)
    captured = torch.ones(2, 3, dtype=torch.bool)
    captured[1, 2] = False
    assert RouteBatch(zeros, captured).num_uncaptured == 1
