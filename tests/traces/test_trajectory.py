"""`TrajectoryTrace` against a slow, obvious model of the same rules, and each rule by itself."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_trace import EOS, FIELDS, SCORE, VOCAB, SlowTrace, Turns, append, as_routes

from trl_support_replay.traces import (
    ArrayField,
    RoutedExperts,
    RoutesError,
    SupportError,
    SupportField,
    SupportRows,
    Trajectory,
    TrajectoryError,
    TrajectoryTrace,
)

operations = st.lists(
    st.tuples(
        st.sampled_from(["turn", "end of sequence", "end of sequence", "observe", "truncate", "routes", "synthetic"]),
        st.integers(0, 6),
    ),
    max_size=12,
)


@settings(max_examples=3000, deadline=None)
@given(operations, st.integers(0, 3), st.integers(0, 2**32))
def test_every_history_equals_the_obvious_model(history, num_prompt, seed):
    data = Turns(seed)
    trace = TrajectoryTrace(list(range(num_prompt)), FIELDS, eos_token_ids=[EOS])
    slow = SlowTrace(num_prompt)
    for name, size in history:
        closed = bool(slow.tokens) and slow.tokens[-1]["kind"] == "synthetic"
        if not slow.can_remove():
            with pytest.raises(TrajectoryError, match="is not a sampled end of sequence"):
                trace.remove_eos()
        if slow.removed is None:
            with pytest.raises(TrajectoryError, match="No end of sequence was removed"):
                trace.restore_eos()
        if name == "end of sequence" and slow.can_remove():
            assert trace.remove_eos() == EOS
            slow.remove()
        elif name == "end of sequence" and slow.removed:
            trace.restore_eos()
            slow.restore()
        elif name in ("turn", "end of sequence") and not closed:
            tokens = data.turn(size, ends=name == "end of sequence")
            append(trace, tokens)
            slow.sampled(tokens)
        elif name == "observe" and not closed:
            ids = data.rng.integers(0, VOCAB, size).tolist()
            trace.append_observation(ids)
            slow.observation(ids)
        elif name == "synthetic" and not closed:
            if not slow.can_synthesize():
                with pytest.raises(TrajectoryError, match="end of sequence"):
                    trace.append_synthetic_eos(EOS)
            else:
                trace.append_synthetic_eos(EOS)
                slow.synthetic()
        elif name == "truncate":
            n = max(len(slow.tokens) - size + 1, 0)
            trace.truncate(n)
            slow.truncate(n)
        elif name == "routes":
            known = slow.num_routes()
            assert trace.num_recorded("routed_experts") == known
            start = max(known - 1, 0)
            size = min(size, len(slow.sequence) - start)
            rows = data.routes(size)
            trace.record("routed_experts", as_routes(rows), start)
            for token, row in list(zip(slow.sequence[start:], rows, strict=False))[known - start :]:
                token["route"] = row
        assert len(trace) == len(slow.tokens)
    slow.check(trace.finalize())


def support_trace(**kwargs):
    return TrajectoryTrace([7, 8], [SupportField(VOCAB)], eos_token_ids=[EOS], **kwargs)


def sample(trace, ids, logprobs=None):
    rows = SupportRows.from_ragged([[token, token + 1] for token in ids])
    trace.append_sampled(ids, [-1.0 - i for i in range(len(ids))] if logprobs is None else logprobs, support=rows)


def test_a_restored_eos_keeps_its_row_though_observations_came_between():
    trace = support_trace()
    sample(trace, [5, EOS])
    assert trace.remove_eos() == EOS
    trace.append_observation([9, 9, 9])
    trace.restore_eos()
    trajectory = trace.finalize()
    assert trajectory.completion_ids.tolist() == [5, EOS]
    assert trajectory.logprobs.tolist() == [-1.0, -2.0]
    assert trajectory.support.to_lists() == [[5, 6], [EOS, EOS + 1]]
    assert trajectory.turns.tolist() == [[0, 2]]


def test_a_first_turn_of_only_an_eos_leaves_room_for_observations():
    trace = TrajectoryTrace([7], FIELDS, eos_token_ids=[EOS])
    tokens = [{"id": EOS, "logprob": -0.5, "row": [EOS], "score": [1, 2, 3]}]
    append(trace, tokens)
    trace.remove_eos()
    trace.append_observation([9, 9])
    trajectory = trace.finalize()
    assert trajectory.completion_ids.tolist() == [9, 9]
    assert trajectory.side["score"].tolist() == [[-7] * 3] * 2
    assert trajectory.routed_experts.experts.shape == (3, 2, 2)
    assert [len(step) for step in trajectory.steps()] == [0]
    trace.restore_eos()
    assert trace.finalize().support.to_lists() == [[EOS]]


def test_a_history_that_was_tokenized_anew_is_refused():
    trace = support_trace()
    sample(trace, [5, 6])
    trace.append_history([7, 8, 5, 6, 9])
    assert trace.finalize().completion_ids.tolist() == [5, 6, 9]
    with pytest.raises(TrajectoryError, match="id 30 at position 2, where the trace has id 5"):
        trace.append_history([7, 8, 30, 6, 9, 10])
    with pytest.raises(TrajectoryError, match="history has 4 tokens, and the trace already 5"):
        trace.append_history([7, 8, 5, 6])
    assert trace.finalize().completion_ids.tolist() == [5, 6, 9]


@pytest.mark.parametrize("setting", ["full_vocab", "mask", "error"])
def test_a_synthetic_eos_is_marked_and_has_neither_row_nor_log_prob(setting):
    trace = support_trace()
    sample(trace, [5, 6])
    trace.append_observation([9])
    trace.append_synthetic_eos(EOS)
    if setting == "error":
        with pytest.raises(TrajectoryError, match=r"Token 2 \(id 2\) is an end of sequence that was not sampled"):
            trace.finalize(synthetic_eos=setting)
        return
    trajectory = trace.finalize(synthetic_eos=setting)
    assert trajectory.completion_ids.tolist() == [5, 6, EOS]
    assert trajectory.support.sizes.tolist() == [2, 2, 0]
    assert np.isnan(trajectory.logprobs).tolist() == [False, False, True]
    assert trajectory.loss_mask.tolist() == [True, True, setting == "full_vocab"]
    assert trajectory.has_synthetic_eos == (setting == "full_vocab")
    assert trajectory.turns.tolist() == [[0, 3 if setting == "full_vocab" else 2]]


def test_nothing_follows_a_synthetic_eos_until_it_is_cut_off():
    trace = support_trace()
    with pytest.raises(TrajectoryError, match="no sampled turn"):
        trace.append_synthetic_eos(EOS)
    sample(trace, [5])
    with pytest.raises(TrajectoryError, match="id 4 does not end a sequence"):
        trace.append_synthetic_eos(4)
    trace.append_synthetic_eos(EOS)
    for follow in (
        lambda: sample(trace, [5]),
        lambda: trace.append_observation([1]),
        lambda: trace.append_synthetic_eos(EOS),
    ):
        with pytest.raises(TrajectoryError, match="after which nothing may follow"):
            follow()
    trace.truncate(1)
    sample(trace, [6])
    assert trace.finalize().completion_ids.tolist() == [5, 6]


def test_the_sampled_eos_is_not_doubled_by_a_synthetic_one():
    trace = support_trace()
    sample(trace, [5, EOS])
    with pytest.raises(TrajectoryError, match="ends in a sampled end of sequence, at token 1"):
        trace.append_synthetic_eos(EOS)
    trace.remove_eos()
    with pytest.raises(TrajectoryError, match="restore that one"):
        trace.append_synthetic_eos(EOS)


def unfinished():
    trajectory = support_trace()
    sample(trajectory, [5, 6, 7])
    return trajectory.finalize()


@pytest.mark.parametrize("unsampled", [[0, 2], [1], [0, 1, 2]])
def test_loss_bearing_tokens_without_row_are_counted_over_the_whole_trajectory(unsampled):
    # Each half of the trajectory, as two ranks would see it, has one of them at most at its end.
    whole = unfinished()
    logprobs = whole.logprobs.copy()
    logprobs[unsampled] = np.nan
    rows = whole.support.take([-1 if t in unsampled else t for t in range(3)])
    with pytest.raises(TrajectoryError, match=f"{len(unsampled)} of 3 tokens are loss-bearing.* token {unsampled[0]} "):
        Trajectory(**{**vars(whole), "logprobs": logprobs, "side": {"support": rows}})


def test_rows_shifted_by_one_are_found():
    whole = unfinished()
    for indices, error, message in (
        ([2, 0, 1], SupportError, "row 0 has 2 ids, and the sampled id 5 is not"),
        ([-1, 0, 1], TrajectoryError, r"token 0 \(id 5\) was sampled, and its support is empty"),
    ):
        shifted = Trajectory(**{**vars(whole), "side": {"support": whole.support.take(indices)}})
        with pytest.raises(error, match=message):
            shifted.validate()


def test_a_support_of_an_observation_is_found():
    trace = support_trace()
    sample(trace, [5])
    trace.append_observation([6])
    whole = trace.finalize()
    rows = SupportRows.from_ragged([[5], [6]])
    with pytest.raises(TrajectoryError, match=r"token 1 \(id 6\) was not sampled; its support has 1 ids"):
        Trajectory(**{**vars(whole), "side": {"support": rows}}).validate()
    with pytest.raises(TrajectoryError, match=r"token 0 \(id 5\) was sampled, and its support is empty"):
        Trajectory(**{**vars(whole), "side": {"support": SupportRows.empty(2)}}).validate()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": np.ones(2, bool)}, r"loss_mask is bool \(2,\), not bool \(3,\)"),
        ({"logprobs": np.zeros(3)}, "logprobs is float64"),
        ({"completion_ids": np.arange(4, dtype=np.int32)}, r"loss_mask is bool \(3,\), not bool \(4,\)"),
        ({"turns": np.array([[0, 4]])}, r"Turns \[\[0, 4\]\] overlap or leave 3"),
        ({"turns": np.array([[0, 2], [1, 3]])}, "overlap"),
        ({"turns": np.array([[0, 2]])}, "Token 2 lies outside the turns"),
        ({"logprobs": np.array([0, -np.inf, 0], np.float32)}, "Token 1 has log-prob -inf"),
        ({"side": {"support": SupportRows.empty(2)}}, "support has 2 rows; 2 prompt and 3 completion tokens need 3"),
        ({"side": {}}, r"Side data \[\] for fields \['support'\]"),
    ],
)
def test_counts_that_disagree_are_refused(change, message):
    with pytest.raises(TrajectoryError, match=message):
        Trajectory(**{**vars(unfinished()), **change})


def good_turn():
    return {
        "token_ids": [5, 6],
        "logprobs": [-1.0, -2.0],
        "support": SupportRows.from_ragged([[5], [6, 7]]),
        "score": np.zeros((2, 3), np.int16),
    }


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logprobs": [-1.0]}, TrajectoryError, r"log-probs of shape \(1,\) for 2 tokens"),
        ({"logprobs": [-1.0, float("nan")]}, TrajectoryError, r"token 1 \(id 6\) has log-prob nan"),
        ({"token_ids": [5, -1]}, TrajectoryError, "id -1 at position 1"),
        ({"token_ids": [5.0, 6.0]}, TrajectoryError, "float64"),
        ({"support": SupportRows.from_ragged([[5]])}, TrajectoryError, "support has 1 rows for 2 tokens"),
        (
            {"support": SupportRows.from_ragged([[5], []])},
            TrajectoryError,
            "1 of 2 sampled tokens have an empty support",
        ),
        ({"support": SupportRows.from_ragged([[6], [5]])}, SupportError, "turn 1: support: row 0 .* sampled id 5"),
        ({"support": SupportRows.from_ragged([[5], [6, VOCAB]])}, SupportError, "outside a vocabulary of 50"),
        ({"support": [[5], [6]]}, TrajectoryError, "support is a list, not a SupportRows"),
        ({"score": np.zeros((3, 3), np.int16)}, TrajectoryError, "score has 3 rows for 2 tokens"),
        ({"score": np.zeros((2, 4), np.int16)}, TrajectoryError, r"rows of shape \(4,\), not \(3,\)"),
        ({"score": np.zeros((2, 3), np.int32)}, TrajectoryError, "score has type int32, not int16"),
        ({"score": None}, TrajectoryError, r"made for the fields \['score', 'support'\], and the turn brings"),
        ({"other": np.zeros(2)}, TrajectoryError, "the turn brings .*other"),
    ],
)
def test_a_turn_that_does_not_fit_is_refused_and_leaves_the_trace_as_it_was(change, error, message):
    trace = TrajectoryTrace([7], FIELDS, eos_token_ids=[EOS])
    trace.append_sampled(**good_turn())
    before = trace.finalize()
    turn = {name: value for name, value in {**good_turn(), **change}.items() if value is not None}
    with pytest.raises(error, match=message):
        trace.append_sampled(**turn)
    assert trace.finalize() == before
    trace.append_sampled(**good_turn())
    assert len(trace) == 4


def test_routes_that_do_not_fit_are_refused():
    trace = TrajectoryTrace([7], FIELDS, eos_token_ids=[EOS])
    trace.append_sampled(**good_turn())
    rows = as_routes([[[0, 1], [2, 3]]] * 4)
    with pytest.raises(TrajectoryError, match="rows start at token 1, and 0 tokens have rows"):
        trace.record("routed_experts", rows[:1], 1)
    with pytest.raises(TrajectoryError, match="rows end at token 4 of 3"):
        trace.record("routed_experts", rows, 0)
    with pytest.raises(TrajectoryError, match=r"sequence fields are \['routed_experts'\]"):
        trace.record("support", rows, 0)
    other = RoutedExperts(np.array([[[0, 1]]]), num_experts=5, layers=[1])
    with pytest.raises(RoutesError, match=r"recorded layers \(1,\), expected \(1, 2\)"):
        trace.record("routed_experts", other, 0)
    trace.record("routed_experts", rows[:2], 0)
    assert trace.finalize().routed_experts.captured.tolist() == [True, True, False]


def test_field_names_are_unique_and_not_reserved():
    for fields in ([SCORE, SCORE], [ArrayField("logprobs", np.int8, fill=0)]):
        with pytest.raises(TrajectoryError, match="not unique, or are reserved"):
            TrajectoryTrace([1], fields)


def test_appending_costs_what_is_new():
    # Twice the history must not make a turn's cost grow: chunks so far are neither copied nor looked through.
    trace = support_trace()
    for _ in range(200):
        sample(trace, [5] * 50)
        trace.append_observation([9] * 50)
    stores = [rows for rows in trace._stores.values()]
    chunks = [list(rows._chunks) for rows in stores]
    sample(trace, [5, EOS])
    trace.remove_eos()
    trace.append_observation([9])
    trace.restore_eos()
    for rows, before in zip(stores, chunks, strict=True):
        assert all(new is old for new, old in zip(rows._chunks, before, strict=False))
        assert len(rows._chunks) <= len(before) + 2


def test_a_trajectory_survives_a_deep_copy_and_knows_what_it_lacks():
    trajectory = unfinished()
    assert copy.deepcopy(trajectory) == trajectory
    with pytest.raises(TrajectoryError, match=r"no routed_experts; it has \['support'\]"):
        _ = trajectory.routed_experts
