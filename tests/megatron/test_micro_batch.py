"""Laying recorded traces out, against their definition token by token."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.megatron import recorded
from trl_support_replay.megatron import MicroBatch, SequenceShard
from trl_support_replay.traces import SupportError
from trl_support_replay.traces.columns import Trace, TraceSchemaError
from trl_support_replay.traces.shifts import LogitShifts

VOCAB, LAYERS = 40, 2


def traces(seed: int, count: int) -> list[Trace]:
    return [
        recorded.random_trace(seed * 10 + i, vocab=VOCAB, num_layers=LAYERS, synthetic_eos=i % 2 == 1)
        for i in range(count)
    ]


def check_position(batch: MicroBatch, row: int, position: int, trace: Trace, index: int) -> None:
    """`index` is the token's place in the trace."""
    tokens, routes = batch.tokens, batch.routes
    ids = np.concatenate([trace.prompt_ids, trace.completion_ids])
    flat = row * tokens.input_ids.shape[1] + position
    assert tokens.input_ids[row, position] == ids[index]
    assert tokens.position_ids[row, position] == index
    assert routes is not None
    assert not routes.padding[row, position]
    assert routes.captured[row, position] == trace.routes.captured[index]
    if routes.captured[row, position]:
        assert routes.experts[row, position].tolist() == trace.routes.experts[index].tolist()
    if index + 1 == len(ids):
        assert not tokens.loss_mask[row, position]
        return
    assert tokens.target_ids[row, position] == ids[index + 1]
    target = index + 1 - len(trace.prompt_ids)
    if target < 0:
        assert not tokens.loss_mask[row, position]
        assert tokens.recorded_logprobs[row, position].isnan()
        assert len(tokens.support[flat]) == 0
    else:
        assert tokens.loss_mask[row, position] == trace.loss_mask[target]
        np.testing.assert_equal(tokens.recorded_logprobs[row, position].item(), trace.sampling_logprobs[target])
        assert tokens.support[flat].tolist() == trace.supports[target].tolist()


@given(seed=st.integers(0, 10_000), count=st.integers(1, 4), multiple=st.integers(1, 8), packed=st.booleans())
def test_every_position(seed: int, count: int, multiple: int, packed: bool) -> None:
    whole = traces(seed, count)
    batch = MicroBatch.from_traces(whole, multiple=multiple, packed=packed, pad_token_id=7, vocab_size=VOCAB)
    width = batch.tokens.input_ids.shape[1]
    assert batch.tokens.input_ids.shape[0] == (1 if packed else count)
    assert sum(batch.lengths) == width
    assert all(length % multiple == 0 for length in batch.lengths)
    seen = torch.zeros(batch.tokens.input_ids.shape, dtype=torch.bool)
    for i, trace in enumerate(whole):
        row, start = (0, sum(batch.lengths[:i])) if packed else (i, 0)
        for index in range(len(trace.prompt_ids) + len(trace.completion_ids)):
            check_position(batch, row, start + index, trace, index)
            seen[row, start + index] = True
    assert batch.routes is not None
    assert torch.equal(batch.routes.padding, ~seen)
    assert batch.routes.layers == (0, 1)
    assert bool((batch.tokens.input_ids[~seen] == 7).all())
    assert not batch.tokens.loss_mask[~seen].any()
    assert batch.num_loss_tokens == sum(int(trace.loss_mask.sum()) for trace in whole)
    assert batch.num_synthetic_eos == count // 2


@given(seed=st.integers(0, 10_000), context=st.integers(1, 3), tensor=st.integers(1, 3), packed=st.booleans())
def test_ranks_hold_every_position_once(seed: int, context: int, tensor: int, packed: bool) -> None:
    multiple = SequenceShard(context, 0, tensor, 0).multiple
    batch = MicroBatch.from_traces(traces(seed, 3), multiple=multiple, packed=packed)
    shards = [SequenceShard(context, rank, tensor, 0) for rank in range(context)]
    order = torch.cat([shard.before_scatter.positions(batch.lengths) for shard in shards]).argsort()
    parts = [batch.local(shard) for shard in shards]
    for name in ("input_ids", "position_ids", "target_ids", "loss_mask", "recorded_logprobs"):
        joined = torch.cat([getattr(part, name) for part in parts], dim=1)[:, order]
        torch.testing.assert_close(joined, getattr(batch.tokens, name), rtol=0, atol=0, equal_nan=True)
    for row in range(batch.tokens.input_ids.shape[0]):
        rows = [
            part.support[row * part.input_ids.shape[1] + i] for part in parts for i in range(part.input_ids.shape[1])
        ]
        width = batch.tokens.input_ids.shape[1]
        for position in range(width):
            assert rows[order[position]].tolist() == batch.tokens.support[row * width + position].tolist()


def test_attention_stays_within_packed_sequences() -> None:
    batch = MicroBatch.from_traces(traces(0, 2), packed=True)
    mask = batch.attention_mask()[0, 0]
    first, second = batch.lengths
    assert mask.shape == (first + second, first + second)
    assert torch.equal(~mask[:first, :first], torch.ones(first, first, dtype=torch.bool).tril())
    assert torch.equal(~mask[first:, first:], torch.ones(second, second, dtype=torch.bool).tril())
    assert mask[first:, :first].all() and mask[:first, first:].all()
    params = batch.packed_seq_params()
    assert params.cu_seqlens_q.tolist() == [0, first, first + second]
    assert params.cu_seqlens_q.dtype == torch.int32
    assert params.max_seqlen_q == max(first, second)


@pytest.mark.parametrize("packed", [False, True])
def test_a_given_width(packed: bool) -> None:
    whole = traces(3, 2)
    least = MicroBatch.from_traces(whole, multiple=4, packed=packed).tokens.input_ids.shape[1]
    batch = MicroBatch.from_traces(whole, multiple=4, packed=packed, width=least + 8)
    assert batch.tokens.input_ids.shape[1] == sum(batch.lengths) == least + 8
    for width in (least - 4, least + 2):
        with pytest.raises(ValueError, match=f"width={width} does not fit .* multiple of 4 from {least} up"):
            MicroBatch.from_traces(whole, multiple=4, packed=packed, width=width)


def test_traces_that_cannot_be_laid_out() -> None:
    with pytest.raises(ValueError, match="no trace"):
        MicroBatch.from_traces([])
    (trace,) = traces(0, 1)
    with pytest.raises(SupportError, match="trace 0: row 0: id .* is outside a vocabulary of 5"):
        MicroBatch.from_traces([trace], vocab_size=5)
    routes = trace.routes[len(trace.prompt_ids) :]
    bare = dataclasses.replace(trace, prompt_ids=trace.prompt_ids[:0], routes=routes)
    with pytest.raises(ValueError, match="trace 0 has no prompt"):
        MicroBatch.from_traces([bare])
    with pytest.raises(ValueError, match="1 of 2 traces have routes"):
        MicroBatch.from_traces([trace, dataclasses.replace(trace, routes=None)])
    # Two ends of sequence that nobody sampled: counted before any split, so that no rank could take them for one each.
    supports = trace.supports.take(np.array([-1, *range(1, len(trace.completion_ids) - 1), -1]))
    with pytest.raises(SupportError, match="trace 0: 2 loss-bearing tokens have no support"):
        MicroBatch.from_traces([dataclasses.replace(trace, supports=supports)])
    shifted = dataclasses.replace(trace, shifts=LogitShifts(repetition_penalty=1.5))
    with pytest.raises(
        TraceSchemaError, match="Trace 1 was sampled with .* scores in Megatron-Core do not repeat that"
    ):
        MicroBatch.from_traces([trace, shifted])


def test_traces_without_routes() -> None:
    whole = [recorded.random_trace(i, vocab=VOCAB) for i in range(2)]
    assert MicroBatch.from_traces(whole).routes is None
