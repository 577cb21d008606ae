"""Log-probs that know their rows, and routes of completions that are put together from several requests."""

import copy
import json
import multiprocessing
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_support_replay.rollouts.recorder import SupportRecorder, TracedLogprob
from trl_support_replay.traces.routes import RoutedExperts, RoutesError
from trl_support_replay.traces.support import SupportRows

NUM_EXPERTS = 1000


class Rollout:
    """A completion that grows turn by turn, of tokens with ids of their own, by an engine whose every forward differs.

    Attributes:
        ids: prompt and completion.
        logprobs: of the completion; 0.0 for observations.
        kept: for each request that has tokens in the completion, its experts `[P + T]`, -1 where it reports none, and
            the position of the last token that was kept.
    """

    def __init__(self, prompt_length):
        self.recorder = SupportRecorder()
        self.ids = list(range(prompt_length))
        self.prompt_length = prompt_length
        self.logprobs = []
        self.kept = []
        self._requests = 0

    def sample(self, num_tokens, num_kept, lost=0):
        """Sample a turn and keep its beginning; the engine loses the last `lost` of the rows that it had."""
        prompt, self._requests = list(self.ids), self._requests + 1
        tokens = [1000 * self._requests + i for i in range(num_tokens)]
        total = len(prompt) + num_tokens
        experts = (self._requests * 100 + np.arange(total)) % NUM_EXPERTS
        captured = np.arange(total) < total - 1 - lost
        routes = RoutedExperts(experts[:, None, None], num_experts=NUM_EXPERTS, captured=captured)
        rows = SupportRows.from_ragged([[token] for token in tokens])
        values = self.recorder.add(tokens, np.full(num_tokens, -1.0), rows, 0, routes, prompt)
        self.ids += tokens[:num_kept]
        self.logprobs += values[:num_kept]
        if num_kept:
            self.kept.append((np.where(captured, experts, -1), len(self.ids) - 1))

    def observe(self, num_tokens):
        self.ids += [999] * num_tokens
        self.logprobs += [0.0] * num_tokens

    def routes(self, where="completion 4"):
        indices = self.recorder.row_indices(self.logprobs)
        return self.recorder.routes_of(indices, np.array(self.ids), self.prompt_length, where)

    def expected(self):
        """`[P + T]` experts, position by position; -1 where nobody recorded one."""
        experts = []
        for position in range(len(self.ids)):
            # The request that first ran this token to sample one of the tokens after it that were kept.
            choices = [own[position] for own, last in self.kept if position < last and own[position] >= 0]
            own, last = self.kept[-1]
            if position == last:  # nothing that was kept depends on it
                choices.append(own[position])
            experts.append(choices[0] if choices else -1)
        return experts


def test_a_request_ends_with_its_last_kept_token():
    rollout = Rollout(prompt_length=3)
    rollout.sample(num_tokens=5, num_kept=2)  # positions 3 and 4
    rollout.observe(1)
    rollout.sample(num_tokens=4, num_kept=4)  # positions 6 to 9
    routes = rollout.routes()
    assert routes.experts[:9, 0, 0].tolist() == [100, 101, 102, 103, 204, 205, 206, 207, 208]
    assert routes.captured.tolist() == [True] * 9 + [False]


TURNS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(0, 3), st.sampled_from([0, 0, 0, 1, 4, 99])), max_size=6
)


@given(st.integers(1, 4), TURNS, st.integers(1, 4), st.integers(0, 3))
def test_each_position_has_the_experts_that_the_tokens_after_it_were_sampled_through(prompt, turns, last, trailing):
    rollout = Rollout(prompt)
    for sampled, kept, observed, lost in turns:
        rollout.sample(sampled, min(kept, sampled), min(lost, len(rollout.ids) + sampled - 1))
        rollout.observe(observed)
    rollout.sample(last, last)
    rollout.observe(trailing)
    routes, expected = rollout.routes(), np.array(rollout.expected())
    assert routes.captured.tolist() == (expected >= 0).tolist()
    assert routes.experts[routes.captured, 0, 0].tolist() == expected[expected >= 0].tolist()


def test_a_turn_shared_by_two_completions_keeps_its_routes_in_both():
    rollout = Rollout(prompt_length=2)
    rollout.sample(num_tokens=6, num_kept=6)
    turn_ids, turn_logprobs = rollout.ids[2:], rollout.logprobs
    for num_kept in (4, 2):
        rollout.ids, rollout.logprobs = [0, 1, *turn_ids[:num_kept]], turn_logprobs[:num_kept]
        rollout.kept = [(np.array([*range(100, 107), -1]), 1 + num_kept)]
        rollout.sample(num_tokens=3, num_kept=3)
        routes, expected = rollout.routes(), np.array(rollout.expected())
        assert routes.experts[:-1, 0, 0].tolist() == expected[:-1].tolist()
        assert routes.captured.sum() == len(routes) - 1


def test_routes_of_another_history_are_refused():
    def turn(edit):
        rollout = Rollout(prompt_length=3)
        rollout.sample(4, 4)
        rollout.observe(1)
        rollout.sample(3, 3)
        edit(rollout)
        with pytest.raises(RoutesError) as error:
            rollout.routes()
        return str(error.value)

    def cut_off_the_beginning(rollout):
        del rollout.ids[3], rollout.logprobs[0]

    def cut_afterwards(rollout):  # as if the second turn had followed fewer tokens
        del rollout.ids[5:7], rollout.logprobs[2:4]

    def another_observation(rollout):
        rollout.ids[7] = 998

    assert "token 0 was sampled at position 4 of its request, and stands at position 3" in turn(cut_off_the_beginning)
    assert "token 3 was sampled at position 8 of its request, and stands at position 6" in turn(cut_afterwards)
    assert "had id 999 at position 7, and here it is 998" in turn(another_observation)


def test_routes_must_fit_their_request():
    routes = RoutedExperts(np.zeros((4, 1, 1), int), num_experts=2)
    with pytest.raises(RoutesError, match="recorded tokens 4, expected 3"):
        SupportRecorder().add([7], np.zeros(1), SupportRows.from_ragged([[7]]), 0, routes, prompt_ids=[1, 2])


def send_back(queue, values):
    queue.put(values)


def through_a_process(values):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=send_back, args=(queue, values))
    process.start()
    try:
        return queue.get(timeout=60)
    finally:
        process.join()


@pytest.mark.parametrize(
    "way",
    [
        copy.copy,
        copy.deepcopy,
        lambda values: [copy.copy(x) for x in values],
        *(lambda values, n=n: pickle.loads(pickle.dumps(values, n)) for n in range(pickle.HIGHEST_PROTOCOL + 1)),
        through_a_process,
    ],
)
def test_copies_of_logprobs_keep_their_rows(way):
    recorder = SupportRecorder()
    recorder.add([5], np.array([-0.5]), SupportRows.from_ragged([[5]]))
    values = way([*recorder.add([7, 8], np.array([-1.5, -2.5]), SupportRows.from_ragged([[7], [8]])), 0.0])
    assert values == [-1.5, -2.5, 0.0] and all(type(x) is TracedLogprob for x in values[:2])
    assert recorder.row_indices(values).tolist() == [1, 2, -1]


def test_numbers_made_of_logprobs_have_no_row():
    recorder = SupportRecorder()
    values = recorder.add([7, 8], np.array([-1.5, -2.5]), SupportRows.from_ragged([[7], [8]]))
    made = [values[0] + 0.0, float(values[0]), json.loads(json.dumps(values))[0], np.array(values)[0], None]
    assert recorder.row_indices(made).tolist() == [-1] * 5


def test_logprobs_of_another_batch_have_no_row_in_this_one():
    first, second = SupportRecorder(), SupportRecorder()
    values = first.add([7], np.array([-1.5]), SupportRows.from_ragged([[7]]))
    second.add([9], np.array([-0.5]), SupportRows.from_ragged([[9]]))
    assert first.row_indices(values).tolist() == [0] and second.row_indices(values).tolist() == [-1]
