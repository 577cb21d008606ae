"""Metrics over ranks that hold different numbers of tokens, or the same tokens."""

from __future__ import annotations

import pytest

from tests.ranks import run_on_ranks


@pytest.fixture(scope="module")
def found():
    ranks = run_on_ranks(2, "tests.checks.metric_cases:everything")
    splits = [rank.pop("split") for rank in ranks]
    assert repr(ranks[0]) == repr(ranks[1])  # as text: NaN is not equal to itself
    return ranks[0] | {"split": splits}


def test_routes_are_weighted_by_their_number(found):
    routes = found["routes"]
    assert routes["routes/agreement"] == 995 / 1010  # and not the mean of 0.99 and 0.5
    assert routes["routes/agreement_layer_3"] == 502 / 505 and routes["routes/agreement_layer_4"] == 493 / 505
    assert routes["routes/order_mismatch"] == 8 / 202 and routes["routes/uncaptured"] == 3


def test_a_rank_without_captured_routes_does_not_count(found):
    routes = found["one rank captured nothing"]
    assert routes["routes/agreement"] == 0.99 and routes["routes/agreement_layer_4"] == 0.98
    assert routes["routes/order_mismatch"] == 7 / 200 and routes["routes/uncaptured"] == 9
    nothing = found["no rank captured anything"]
    assert nothing["routes/agreement"] != nothing["routes/agreement"] and nothing["routes/uncaptured"] == 8


def test_supports_are_weighted_by_their_number(found):
    assert found["supports"] == {
        "support/tokens": 5,
        "support/size_mean": 20 / 5,
        "support/size_max": 8,
        "support/singleton_fraction": 1 / 5,
        "support/repaired": 4,
        "support/synthetic_eos": 1,
    }
    assert found["no token on one rank"]["support/size_mean"] == 2.5
    assert found["no token on one rank"]["support/size_max"] == 4


def test_the_samples_of_a_split_policy_count_once(found):
    assert found["one policy"] == {
        "support/tokens": 2,
        "support/size_mean": 2.5,
        "support/size_max": 4,
        "support/singleton_fraction": 0.5,
        "support/repaired": 3,
        "support/synthetic_eos": 1,
    }


def test_large_counts_are_gathered_exactly(found):
    assert found["gathered"] == [[2**24 + 1, 0.1], [2**24 + 2, 0.1]]


def test_the_processes_of_a_split_policy_have_the_same_samples(found):
    first, second = found["split"]
    for rank in (first, second):
        assert rank["same"][0] == "" and rank["differ"][0] == "SamplesDifferError"
        assert "Processes 0 to 1 hold the parts of one policy (tp_size=2)" in rank["differ"][1]
        # The second process's rewards, 10 to 12, would train its part of the policy on something else.
        assert rank["rewards"] == [0, 1, 2, 0, 1, 2]
        assert rank["std"] == 1  # of 0, 1, 2; over both copies it is 0.89
    assert first["first"] and not second["first"]
