"""Cutting a micro-batch's routes for one rank, against the definition of each split."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_support_replay.megatron.local_routes import as_route_batch, local_routes
from trl_support_replay.megatron.sequence_shard import SequenceShard
from trl_support_replay.routing import RouteBatch, RouterReplayError
from trl_support_replay.traces import RoutesError

EXPERTS = 8


def shards(context_size: int, tensor_size: int) -> list[SequenceShard]:
    return [SequenceShard(context_size, c, tensor_size, t) for c in range(context_size) for t in range(tensor_size)]


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    context, tensor = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    unit = SequenceShard(context, 0, tensor, 0).multiple
    return context, tensor, [unit * n for n in draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))]


@given(splits())
def test_every_position_is_on_exactly_one_rank(split: tuple[int, int, list[int]]) -> None:
    context, tensor, lengths = split
    parts = [shard.positions(lengths) for shard in shards(context, tensor)]
    assert len({len(part) for part in parts}) == 1
    assert torch.cat(parts).sort().values.tolist() == list(range(sum(lengths)))


@given(splits())
def test_context_ranks_hold_the_same_amount_of_causal_attention(split: tuple[int, int, list[int]]) -> None:
    context, _, lengths = split
    starts = torch.repeat_interleave(torch.tensor([0, *lengths[:-1]]).cumsum(0), torch.tensor(lengths))
    costs = []
    for shard in shards(context, 1):
        positions = shard.positions(lengths)
        costs.append(int((positions - starts[positions] + 1).sum()))
    assert len(set(costs)) == 1


@given(splits())
def test_sequence_parallel_ranks_split_their_context_rank_in_order(split: tuple[int, int, list[int]]) -> None:
    context, tensor, lengths = split
    for c in range(context):
        parts = [SequenceShard(context, c, tensor, t).positions(lengths) for t in range(tensor)]
        assert torch.equal(torch.cat(parts), SequenceShard(context, c, tensor, 0).before_scatter.positions(lengths))


def test_zig_zag_of_two_packed_sequences() -> None:
    first, second = (SequenceShard(2, rank).positions([8, 4]).tolist() for rank in (0, 1))
    assert first == [0, 1, 6, 7, 8, 11]
    assert second == [2, 3, 4, 5, 9, 10]


@pytest.mark.parametrize(
    ("shard", "lengths", "multiple"), [((2, 0), [8, 6], 4), ((1, 0, 2, 0), [3], 2), ((2, 0, 3, 0), [8], 12)]
)
def test_a_length_that_cannot_be_cut(shard: tuple[int, ...], lengths: list[int], multiple: int) -> None:
    with pytest.raises(ValueError, match=f"{lengths[-1]} positions .* multiple of {multiple}"):
        SequenceShard(*shard).positions(lengths)


def random_batch(seed: int, batch: int, width: int, layers: int, top_k: int, dtype: torch.dtype) -> RouteBatch:
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(batch, width, layers, EXPERTS, generator=generator).topk(top_k).indices.to(dtype)
    kind = torch.randint(0, 3, (batch, width), generator=generator)
    return RouteBatch(experts, captured=kind == 0, padding=kind == 2)


@settings(max_examples=50)
@given(
    split=splits(),
    batch=st.integers(1, 3),
    top_k=st.integers(1, EXPERTS),
    columns=st.sets(st.integers(0, 3), max_size=4),
    dtype=st.sampled_from([torch.uint8, torch.uint16, torch.int32, torch.int64]),
    seed=st.integers(0, 2**16),
)
def test_local_routes_are_those_of_the_ranks_tokens(
    split: tuple[int, int, list[int]], batch: int, top_k: int, columns: set[int], dtype: torch.dtype, seed: int
) -> None:
    context, tensor, lengths = split
    whole = random_batch(seed, batch, sum(lengths), 4, top_k, dtype)
    for shard in shards(context, tensor):
        local = local_routes(whole, sorted(columns), shard, num_experts=EXPERTS, lengths=lengths)
        assert local.experts.dtype == dtype
        assert local.experts.shape == (len(shard.positions(lengths)) * batch, len(columns), top_k)
        for n in range(local.num_tokens):
            position, row = int(shard.positions(lengths)[n // batch]), n % batch
            assert bool(local.captured[n]) == bool(whole.captured[row, position])
            assert bool(local.chosen[n]) == bool(whole.captured[row, position] | whole.padding[row, position])
            if whole.captured[row, position]:
                want = [whole.experts[row, position, column].tolist() for column in sorted(columns)]
                assert local.experts[n].tolist() == want
        assert local.num_captured == int(local.captured.sum())
        assert local.num_live == local.num_tokens - int(local.chosen.sum())


@given(
    width=st.integers(1, 24), batch=st.integers(1, 3), top_k=st.integers(1, EXPERTS), experts=st.integers(EXPERTS, 12)
)
def test_padding_takes_different_experts_and_loads_all_alike(width: int, batch: int, top_k: int, experts: int) -> None:
    padding = torch.ones(batch, width, dtype=torch.bool)
    whole = RouteBatch(torch.zeros(batch, width, 1, top_k, dtype=torch.uint8), padding=padding)
    local = local_routes(whole, [0], SequenceShard(), num_experts=experts)
    assert all(len(set(row)) == top_k for row in local.experts[:, 0].tolist())
    load = torch.bincount(local.experts.flatten().long(), minlength=experts)
    assert load.max() - load.min() <= 1


def test_padding_mask_is_sequence_first_and_true_where_nothing_was_captured() -> None:
    captured = torch.tensor([[True, True, False, False], [True, True, True, False]])
    padding = torch.tensor([[False, False, False, True], [False, False, False, True]])
    whole = RouteBatch(torch.arange(2, dtype=torch.uint8).expand(2, 4, 1, 2), captured, padding)
    local = local_routes(whole, [0], SequenceShard(), num_experts=EXPERTS)
    assert torch.equal(local.padding_mask, ~captured.T)
    everything = local_routes(RouteBatch(whole.experts), [0], SequenceShard(), num_experts=EXPERTS)
    assert torch.equal(everything.padding_mask, torch.zeros(4, 2, dtype=torch.bool))


def test_columns_of_dense_layers_are_left_out_of_plain_routes() -> None:
    experts = torch.zeros(1, 2, 4, 2, dtype=torch.int64)
    experts[:, :, 1], experts[:, :, 3] = torch.tensor([3, 1]), torch.tensor([0, 7])
    batch = as_route_batch(experts.numpy(), (1, 3), 4, "routes")
    assert torch.equal(batch.experts, experts[:, :, [1, 3]])
    assert torch.equal(as_route_batch(experts[:, :, [1, 3]], (1, 3), 4, "routes").experts, batch.experts)


def test_routes_that_do_not_fit_the_model() -> None:
    experts = np.tile(np.arange(2), (1, 2, 3, 1))
    with pytest.raises(RouterReplayError, match=re.escape("micro-batch 4: routes of 3 layers, the model has experts")):
        as_route_batch(experts, (1, 3), 4, "micro-batch 4")
    experts[0, 1, 2] = 5
    with pytest.raises(RoutesError, match=re.escape("position 1, layer column 2: one expert twice in [5, 5]")):
        as_route_batch(experts, (0, 1, 2), 3, "micro-batch 0")


def test_lengths_that_do_not_add_up() -> None:
    whole = random_batch(0, 1, 8, 1, 2, torch.uint8)
    with pytest.raises(ValueError, match="Packed sequences of 7 positions in all, routes of 8"):
        local_routes(whole, [0], SequenceShard(), num_experts=EXPERTS, lengths=[4, 3])
