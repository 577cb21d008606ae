"""`RoutedExperts` against plain Python lists, and everything it refuses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_support_replay.traces.routes import RoutedExperts, RoutesError, route_dtype


@st.composite
def tables(draw, num_layers=None, top_k=None, num_experts=None):
    """Expert ids as nested lists, `None` for an uncaptured token, with the model's dimensions."""
    num_experts = num_experts or draw(st.sampled_from([3, 8, 256, 257, 70_000]))
    top_k = top_k or draw(st.integers(1, 3))
    num_layers = num_layers or draw(st.integers(1, 3))
    token_route = st.lists(st.integers(0, num_experts - 1), min_size=top_k, max_size=top_k, unique=True)
    token = st.none() | st.lists(token_route, min_size=num_layers, max_size=num_layers)
    return draw(st.lists(token, max_size=6)), num_layers, top_k, num_experts


def build(rows, num_layers, top_k, num_experts):
    filled = [[[0] * top_k] * num_layers if row is None else row for row in rows]
    experts = np.asarray(filled, dtype=np.int64).reshape(len(rows), num_layers, top_k)
    captured = np.asarray([row is not None for row in rows], dtype=bool)
    return RoutedExperts(experts, num_experts=num_experts, layers=range(1, num_layers + 1), captured=captured)


def to_lists(routes):
    return [row if seen else None for row, seen in zip(routes.to_int64().tolist(), routes.captured, strict=True)]


@given(tables())
def test_holds_what_was_given_in_the_smallest_dtype(table):
    rows, num_layers, top_k, num_experts = table
    routes = build(*table)
    assert to_lists(routes) == rows
    assert (len(routes), routes.top_k, routes.layers) == (len(rows), top_k, tuple(range(1, num_layers + 1)))
    assert routes.experts.dtype == {3: "u1", 8: "u1", 256: "u1", 257: "u2", 70_000: "i4"}[num_experts]
    assert routes.captured_prefix == next((i for i, row in enumerate(rows) if row is None), len(rows))


@given(tables(), st.data())
def test_take_and_slice_select_like_lists(table, data):
    rows = table[0]
    routes = build(*table)
    indices = data.draw(st.lists(st.integers(-1, len(rows) - 1), max_size=8))
    assert to_lists(routes.take(indices)) == [None if i == -1 else rows[i] for i in indices]
    cut = data.draw(st.slices(len(rows)))
    assert to_lists(routes[cut]) == rows[cut]


@given(st.lists(tables(num_layers=2, top_k=2, num_experts=8), min_size=1, max_size=4))
def test_concatenate_appends_tokens(parts):
    joined = RoutedExperts.concatenate([build(*part) for part in parts])
    assert to_lists(joined) == [row for part in parts for row in part[0]]
    whole = build([row for part in parts for row in part[0]], 2, 2, 8)
    assert joined == whole


@given(tables(num_layers=2, top_k=2, num_experts=8))
def test_equality_sees_every_part(table):
    routes = build(*table)
    assert routes == build(*table)
    if routes.captured.any():
        other = routes.to_int64()
        other[np.argmax(routes.captured)] = 7 - other[np.argmax(routes.captured)]
        assert routes != RoutedExperts(other, num_experts=8, layers=(1, 2), captured=routes.captured)
        hidden = RoutedExperts(routes.experts, num_experts=8, layers=(1, 2), captured=np.zeros(len(routes), bool))
        assert routes != hidden
    assert routes != RoutedExperts(routes.experts, num_experts=8, layers=(0, 2), captured=routes.captured)
    assert routes != RoutedExperts(routes.experts, num_experts=9, layers=(1, 2), captured=routes.captured)


def test_slices_are_views_and_uncaptured_rows_hold_zeros():
    experts = np.array([[[0, 1]], [[2, 3]], [[3, 2]]], dtype=np.uint8)
    routes = RoutedExperts(experts, num_experts=4)
    assert np.shares_memory(routes.experts, experts)
    assert np.shares_memory(routes[1:].experts, routes.experts)
    hidden = RoutedExperts(experts, num_experts=4, captured=np.array([True, False, True]))
    assert hidden.experts[1].tolist() == [[0, 0]] and experts[1].tolist() == [[2, 3]]


def test_prefix_leaves_the_last_token_uncaptured():
    experts = np.array([[[0, 1]], [[2, 3]]])
    routes = RoutedExperts.from_prefix(experts, 3, num_experts=4, layers=[5])
    assert to_lists(routes) == [[[0, 1]], [[2, 3]], None]
    assert routes.captured_prefix == 2 and routes.layers == (5,)
    with pytest.raises(RoutesError, match="request 7: 2 rows of routes for 1 tokens"):
        RoutedExperts.from_prefix(experts, 1, num_experts=4, where="request 7")


def test_duplicate_experts_are_refused_where_they_stand():
    experts = np.array([[[0, 1], [1, 2]], [[3, 2], [0, 0]]])
    with pytest.raises(RoutesError, match=r"request 4: token 1, layer 9: expert 0 appears twice in \[0, 0\]"):
        RoutedExperts(experts, num_experts=4, layers=[3, 9], where="request 4")
    # A row nobody captured may hold anything.
    RoutedExperts(experts, num_experts=4, captured=np.array([True, False]))


@pytest.mark.parametrize("bad", [-1, 4, 260])
def test_ids_outside_the_experts_are_refused_before_they_wrap(bad):
    experts = np.array([[[0, 1]], [[2, bad]]])
    with pytest.raises(RoutesError, match=f"token 1, layer 0: expert {bad} is outside 0 … 3"):
        RoutedExperts(experts, num_experts=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(experts=np.zeros((2, 3), int)), r"shape \(2, 3\) is not \[tokens, layers, top_k\]"),
        (dict(experts=np.zeros((2, 1, 1))), "float64 are not integers"),
        (dict(experts=np.zeros((2, 1, 1), int), layers=[0, 1]), "1 layer columns, but 2 layer numbers"),
        (dict(experts=np.array([[[0], [1]]]), layers=[2, 2]), "not strictly increasing"),
        (dict(experts=np.array([[[0], [1]]]), layers=[-1, 2]), "not strictly increasing"),
        (dict(experts=np.array([[[0, 1, 2, 3, 4]]])), "top_k=5 does not fit num_experts=4"),
        (dict(experts=np.zeros((2, 1, 1), int), captured=np.ones(3, bool)), r"bool \(3,\), not bool \(2,\)"),
        (dict(experts=np.zeros((2, 1, 1), int), captured=np.ones(2, int)), r"int64 \(2,\), not bool \(2,\)"),
        (dict(experts=np.zeros((2, 1, 1), int), num_experts=0), "num_experts=0"),
    ],
)
def test_malformed_routes_are_refused(arguments, message):
    with pytest.raises(RoutesError, match=message):
        RoutedExperts(**{"num_experts": 4, **arguments})


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (dict(num_tokens=3), "recorded tokens 2, expected 3"),
        (dict(layers=[0]), r"recorded layers \(1,\), expected \[0\]"),
        (dict(top_k=1), "recorded top_k 2, expected 1"),
        (dict(num_experts=8), "recorded experts 4, expected 8"),
    ],
)
def test_check_names_both_numbers(wanted, message):
    routes = RoutedExperts([[[0, 1]], [[2, 3]]], num_experts=4, layers=[1])
    routes.check(num_tokens=2, layers=[1], top_k=2, num_experts=4)
    with pytest.raises(RoutesError, match="sample 5: " + message):
        routes.check(**wanted, where="sample 5")


def test_concatenate_refuses_other_models_and_nothing():
    a = RoutedExperts([[[0, 1]]], num_experts=4)
    with pytest.raises(RoutesError, match="part 1 of 2: recorded experts 5, expected 4"):
        RoutedExperts.concatenate([a, RoutedExperts([[[0, 1]]], num_experts=5)])
    with pytest.raises(RoutesError, match="No routes to concatenate"):
        RoutedExperts.concatenate([])


def test_indices_outside_the_rows_are_refused():
    routes = RoutedExperts([[[0, 1]], [[2, 3]]], num_experts=4)
    with pytest.raises(RoutesError, match="Token index 2 is outside 2 rows"):
        routes.take([0, 2])
    for index in (0, [0], np.ones(2, bool)):
        with pytest.raises(TypeError, match="selected by a slice, or by `take`"):
            routes[index]


def test_empty_keeps_the_model_dimensions():
    routes = RoutedExperts.empty(2, layers=[3, 4], top_k=2, num_experts=300)
    assert to_lists(routes) == [None, None]
    assert (routes.layers, routes.top_k, routes.experts.dtype) == ((3, 4), 2, np.uint16)
    assert len(RoutedExperts.empty(0, layers=[0], top_k=1, num_experts=2)) == 0


def test_route_dtype_bounds():
    assert [route_dtype(n).itemsize for n in (1, 256, 257, 65_536, 65_537)] == [1, 1, 2, 2, 4]
