"""Supports, settings and arguments that cannot be scored, each refused by name."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.scoring.inputs import ALL, head_and_states, random_rows
from trl_support_replay.scoring import (
    LMHead,
    SupportCSR,
    score_support,
    score_support_from_logits,
)
from trl_support_replay.scoring.arguments import plan_for
from trl_support_replay.traces.support import SupportRows


@pytest.mark.parametrize("implementation", [*ALL, "from_logits"])
def test_a_sampled_token_outside_its_row_is_refused(implementation):
    hidden, weight = head_and_states()
    sampled, rows = random_rows(12, 50)
    rows[7] = [v for v in range(20) if v != sampled[7]]
    ids, support = torch.tensor(sampled), SupportCSR.from_lists(rows)
    with pytest.raises(ValueError, match=rf"Token 7 was sampled as id {sampled[7]}, .* 1 of 12 tokens"):
        if implementation == "from_logits":
            score_support_from_logits(hidden @ weight.T, ids, support)
        else:
            score_support(hidden, LMHead(weight), ids, support, implementation=implementation)


def test_a_singleton_that_is_another_token_is_refused():
    hidden, weight = head_and_states(2)
    with pytest.raises(ValueError, match="Token 1 was sampled as id 4"):
        score_support(hidden, LMHead(weight), torch.tensor([3, 4]), SupportCSR.from_lists([[3], [5]]))


@pytest.mark.parametrize(
    ("rows", "sampled", "message"),
    [
        ([[1, 2], [3, 50]], [1, 3], "row 1 has id 50; the head has ids 0 to 49"),
        ([[1, 2], [-1, 3]], [1, 3], "row 1 has id -1"),
        ([[1, 2], [3, 3]], [1, 3], "row 1 holds id 3 more than once"),
        ([[1, 2], []], [1, 50], r"sampled_ids\[1\] = 50"),
        ([[1, 2]], [1, 3], r"shapes \(2, 8\) and \(2,\) and 1 supports"),
        ([[1, 2], []], [1, 3], "1 of 2 tokens have no recorded support .first: token 1"),
    ],
)
def test_impossible_supports_are_refused(rows, sampled, message):
    hidden, weight = head_and_states(2)
    with pytest.raises(ValueError, match=message):
        empty_rows = "full" if "50" in message and "sampled" in message else "error"
        score_support(hidden, LMHead(weight), torch.tensor(sampled), SupportCSR.from_lists(rows), empty_rows=empty_rows)


def test_candidates_beyond_the_head_are_found_without_reading_the_device():
    with pytest.raises(ValueError, match="row 1 has id 50; the head has ids 0 to 49"):
        plan_for(SupportCSR.from_lists([[0, 1], [0, 50]]), None, 50, "union")


def test_arguments_of_another_type_are_named():
    hidden, weight, rows = torch.randn(1, 4), torch.randn(9, 4), SupportRows.from_ragged([[1, 2]])
    with pytest.raises(TypeError, match="support is a SupportRows, not a SupportCSR"):
        score_support(hidden, LMHead(weight), torch.tensor([1]), rows)
    with pytest.raises(TypeError, match="head is a Tensor, neither an LMHead"):
        score_support(hidden, weight, torch.tensor([1]), SupportCSR.from_lists([[1, 2]]))


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        ([1, 2, 3], [0, 2, 4], "run from 0 to 4; 3 token ids"),
        ([1, 2, 3], [1, 2, 3], "run from 1 to 3"),
        ([1, 2, 3], [0, 2, 1, 3], "fall from 2 to 1 at row 1"),
        ([[1, 2, 3]], [0, 3], r"not shapes \(1, 3\)"),
        ([1.0, 2.5], [0, 2], "token_ids has the data type float64; integers are needed"),
        ([1, 2], [0.0, 2.0], "offsets has the data type float64; integers are needed"),
        ([True, False], [0, 2], "token_ids has the data type bool; integers are needed"),
    ],
)
def test_arrays_that_are_no_rows_are_refused(ids, offsets, message):
    with pytest.raises(ValueError, match=message):
        SupportCSR.from_numpy(np.array(ids), np.array(offsets))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"outputs": ("logprob",)}, "choose one or more among logprobs"),
        ({"outputs": ()}, "choose one or more"),
        ({"implementation": "fast"}, "implementation='fast'"),
        ({"empty_rows": "skip"}, "empty_rows='skip'"),
    ],
)
def test_unknown_settings_are_refused(settings, message):
    hidden, weight = head_and_states(1)
    with pytest.raises(ValueError, match=message):
        score_support(hidden, LMHead(weight), torch.tensor([1]), SupportCSR.from_lists([[1, 2]]), **settings)


def test_sparse_kernels_refuse_half_precision_weights():
    hidden, weight = head_and_states(1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="needs a weight in torch.float32 on a CPU, not torch.bfloat16"):
        score_support(
            hidden, LMHead(weight), torch.tensor([1]), SupportCSR.from_lists([[1, 2]]), implementation="sparse"
        )
