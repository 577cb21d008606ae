"""Alignment of per-token data with model positions: there, shifted, sharded, and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_support_replay.scoring import TokenMetadataLayout

CONTEXT = [(1, True), (2, True), (4, True), (2, False), (4, False)]


@st.composite
def layouts(draw):
    """A layout of any kind whose segments can be cut for up to four zig-zag ranks."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    kind = draw(st.sampled_from(["left", "right", "prompt", "packed", "rows"]))
    if kind == "packed":
        return TokenMetadataLayout.packed(lengths, multiple=8)
    if kind == "rows":
        cut = draw(st.integers(0, len(lengths)))
        order = draw(st.permutations(range(len(lengths))))
        return TokenMetadataLayout.packed_rows(lengths, [order[:cut], order[cut:]], 48)
    if kind == "prompt":
        prompts = [draw(st.integers(0, length)) for length in lengths]
        completions = [n - p for n, p in zip(lengths, prompts, strict=True)]
        return TokenMetadataLayout.prompt_completion(prompts, completions, 11, 13)
    return TokenMetadataLayout.padded(lengths, 16, side=kind)


def shards(layout, size, zigzag):
    return [layout.context_shard(size, rank, zigzag=zigzag) for rank in range(size)]


def tokens_without(layout, first: bool):
    """Token numbers that are held, or (`first`) that are predicted somewhere: all but each trajectory's first."""
    starts = np.cumsum(layout.lengths) - layout.lengths
    return (
        np.setdiff1d(np.arange(layout.num_tokens), starts[layout.lengths > 0])
        if first
        else np.arange(layout.num_tokens)
    )


@settings(deadline=None, max_examples=60)
@given(layout=layouts(), context=st.sampled_from(CONTEXT), shift=st.booleans(), seed=st.integers(0, 99))
def test_align_then_restore_is_the_identity_summed_over_ranks(layout, context, shift, seed):
    values = np.random.default_rng(seed).standard_normal((layout.num_tokens, 2))
    total = np.zeros_like(values)
    for part in shards(layout, *context):
        aligned = part.align(values, np.nan, shift=shift)
        back = part.restore(np.nan_to_num(aligned), 0.0, shift=shift)
        as_tensor = part.restore(torch.from_numpy(np.nan_to_num(aligned)), 0.0, shift=shift)
        assert np.array_equal(back, as_tensor.numpy())
        assert np.array_equal(
            part.align(torch.from_numpy(values), 7.0, shift=shift), part.align(values, 7.0, shift=shift)
        )
        total += back
    held = tokens_without(layout, first=shift)
    assert np.array_equal(total[held], values[held])
    assert not total[np.setdiff1d(np.arange(layout.num_tokens), held)].any()


@settings(deadline=None, max_examples=60)
@given(layout=layouts(), context=st.sampled_from(CONTEXT))
def test_ranks_share_every_position_once_and_evenly(layout, context):
    parts = shards(layout, *context)
    assert len({part.token_at.shape for part in parts}) == 1
    together = np.sort(np.concatenate([part.token_at.reshape(-1) for part in parts]))
    assert np.array_equal(together, np.sort(layout.token_at.reshape(-1)))


@settings(deadline=None, max_examples=60)
@given(layout=layouts(), context=st.sampled_from(CONTEXT))
def test_a_position_predicts_the_next_token_of_its_trajectory(layout, context):
    trajectory = np.repeat(np.arange(len(layout.lengths)), layout.lengths)
    for part in shards(layout, *context):
        for token, predicted in zip(part.token_at.reshape(-1), part.predicted_at.reshape(-1), strict=True):
            last = token < 0 or token + 1 == layout.num_tokens or trajectory[token + 1] != trajectory[token]
            assert predicted == (-1 if last else token + 1)


@settings(deadline=None, max_examples=60)
@given(layout=layouts(), context=st.sampled_from(CONTEXT), seed=st.integers(0, 99))
def test_scored_tokens_are_the_loss_bearing_ones_once(layout, context, seed):
    rng = np.random.default_rng(seed)
    total = layout.num_tokens
    starts = np.cumsum(layout.lengths) - layout.lengths
    loss_mask = rng.random(total) < 0.6
    loss_mask[starts[layout.lengths > 0]] = False
    sizes = np.where(loss_mask, rng.integers(1, 4, total), 0)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    token_ids = np.concatenate([rng.permutation(20)[:size] for size in sizes] or [np.zeros(0)]).astype(np.int64)
    sampled = np.array([token_ids[o] if n else 5 for o, n in zip(offsets[:-1], sizes, strict=True)], dtype=np.int64)
    found = []
    for part in shards(layout, *context):
        scored = part.scored_tokens(sampled, token_ids, offsets, loss_mask)
        assert np.array_equal(part.predicted_at.reshape(-1)[scored.positions], scored.tokens)
        assert np.array_equal(scored.sampled_ids, sampled[scored.tokens])
        for row, token in enumerate(scored.tokens):
            support = scored.support
            got = support.host_token_ids[support.host_offsets[row] : support.host_offsets[row + 1]]
            assert np.array_equal(got, token_ids[offsets[token] : offsets[token + 1]])
        found += scored.tokens.tolist()
    assert sorted(found) == np.flatnonzero(loss_mask).tolist()


def test_two_unsupported_tokens_on_different_ranks_are_refused_on_every_rank():
    layout = TokenMetadataLayout.packed([3, 8], multiple=4)
    loss_mask = np.array([0, 1, 1] + [0] + [1] * 7, dtype=bool)
    sizes = loss_mask.astype(int)
    sizes[[7, 10]] = 0  # one on each rank
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    sampled = np.arange(11)
    token_ids = sampled[sizes > 0]
    holders = [rank for rank in (0, 1) for t in (7, 10) if t in layout.context_shard(2, rank, zigzag=True).predicted_at]
    assert sorted(holders) == [0, 1]
    for rank in (0, 1):
        part = layout.context_shard(2, rank, zigzag=True)
        with pytest.raises(ValueError, match=r"Trajectory 1: 2 of 8 tokens bear loss .*first: token 4"):
            part.scored_tokens(sampled, token_ids, offsets, loss_mask)


@pytest.mark.parametrize("bare", [2, 3])
def test_one_synthetic_end_of_sequence_may_be_without_support_as_the_last_token(bare):
    layout = TokenMetadataLayout.padded([4])
    loss_mask = np.array([0, 1, 1, 1], dtype=bool)
    sizes = loss_mask.astype(int)
    sizes[bare] = 0
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    arguments = np.arange(4), np.arange(4)[sizes > 0], offsets, loss_mask
    if bare == 3:
        assert layout.scored_tokens(*arguments).tokens.tolist() == [1, 2, 3]
    else:
        with pytest.raises(ValueError, match="Only one may, a synthetic end of sequence"):
            layout.scored_tokens(*arguments)


def test_a_support_without_its_sampled_token_is_refused_before_the_shard():
    layout = TokenMetadataLayout.padded([4], 4).context_shard(2, 1, zigzag=True)
    with pytest.raises(ValueError, match="Token 1 was sampled as id 9"):
        layout.scored_tokens(np.array([0, 9, 2, 3]), np.array([1, 2, 3]), np.array([0, 0, 1, 2, 3]), np.arange(4) > 0)


def test_a_first_token_that_bears_loss_is_refused():
    layout = TokenMetadataLayout.padded([2, 2])
    with pytest.raises(ValueError, match="Trajectory 1: its first token bears loss"):
        layout.scored_tokens(np.arange(4), np.arange(1, 4), np.array([0, 0, 1, 2, 3]), np.arange(4) > 0)


def test_trl_batches_put_prompts_left_and_completions_right():
    layout = TokenMetadataLayout.prompt_completion([1, 3], [2, 1])
    assert layout.token_at.tolist() == [[-1, -1, 0, 1, 2], [3, 4, 5, 6, -1]]
    assert layout.predicted_at.tolist() == [[-1, -1, 1, 2, -1], [4, 5, 6, -1, -1]]


def test_packed_rows_know_their_segments():
    layout = TokenMetadataLayout.packed([3, 5], 16, multiple=4)
    assert layout.cu_seqlens.tolist() == [0, 4, 12, 16]
    assert layout.cu_seqlens.dtype == np.int32
    part = layout.context_shard(2, 0, zigzag=True)
    assert part.cu_seqlens.tolist() == [0, 2, 6, 8]
    assert part.token_at.tolist() == [[0, -1, 3, 4, -1, -1, -1, -1]]


def test_a_packed_row_without_trajectories_can_be_cut():
    for size in (1, 2):
        part = TokenMetadataLayout.packed([]).context_shard(size, 0, zigzag=True)
        assert part.token_at.shape == (1, 0)
        assert part.cu_seqlens.tolist() == [0]


def test_restore_is_differentiable():
    layout = TokenMetadataLayout.padded([2, 3], 4, side="left")
    values = torch.randn(2, 4, requires_grad=True)
    layout.restore(values, 0.0).sum().backward()
    assert torch.equal(values.grad, torch.from_numpy(layout.token_at >= 0).float())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenMetadataLayout.padded([3, 5], 4), "Trajectory 1 of 5 tokens does not fit row 1"),
        (lambda: TokenMetadataLayout.padded([3, 5], 4, side="left"), "Trajectory 1 has 5 tokens; the batch has 4"),
        (lambda: TokenMetadataLayout.padded([3], side="middle"), "side='middle'"),
        (lambda: TokenMetadataLayout.prompt_completion([3], [4, 5]), "1 prompts for 2 completions"),
        (lambda: TokenMetadataLayout.prompt_completion([3], [4], 2, 4), "2 and 4 columns"),
        (lambda: TokenMetadataLayout.packed([3, 5], 8, multiple=4), "take 12 positions, in multiples of 4"),
        (lambda: TokenMetadataLayout.packed([3, 5], 13, multiple=4), "width=13"),
        (lambda: TokenMetadataLayout.packed_rows([3, 5], [[0], [0, 1]], 9), "do not hold each of 2 trajectories once"),
        (lambda: TokenMetadataLayout.packed_rows([3, 5], [[0, 1]], 7), "end at column 8 of 7"),
        (lambda: TokenMetadataLayout.padded([3]).context_shard(2, 0, zigzag=True), "pad to a multiple of 4"),
        (lambda: TokenMetadataLayout.padded([3]).context_shard(2, 0, zigzag=False), "pad to a multiple of 2"),
        (lambda: TokenMetadataLayout.padded([3]).align(np.zeros(4), 0), "4 values for the 3 tokens"),
        (lambda: TokenMetadataLayout.padded([3]).restore(np.zeros((1, 4)), 0), r"shape \(1, 4\)"),
        (
            lambda: TokenMetadataLayout.padded([3]).scored_tokens(
                np.zeros(3), np.zeros(0), np.zeros(3, int), np.zeros(3)
            ),
            "offsets covers 2 tokens; the layout has 3",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
