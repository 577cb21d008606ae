"""Reading routed experts from vLLM's outputs: where each row belongs, and what is refused."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_support_replay.engine_outputs.vllm_routes import read_routed_experts
from trl_support_replay.traces.routes import RoutesError

MODEL = {"layers": (1, 3), "num_experts": 300, "top_k": 2, "request": "request 7"}


def engine_rows(num_rows, seed=0):
    """`[n, 5, 2]` as vLLM reports them: layers 0, 2 and 4 are dense."""
    rng = np.random.default_rng(seed)
    rows = np.zeros((num_rows, 5, 2), dtype=np.uint16)
    for row in rows:
        for layer in MODEL["layers"]:
            row[layer] = rng.choice(300, size=2, replace=False)
    return rows


def answer(prompt_length, num_generated, rows):
    completion = SimpleNamespace(token_ids=list(range(num_generated)), routed_experts=rows)
    return SimpleNamespace(prompt_token_ids=list(range(prompt_length))), completion


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_rows_are_placed_by_token_and_layer(prompt_length, num_generated, data):
    start = data.draw(st.integers(0, prompt_length))
    rows = engine_rows(prompt_length + num_generated - 1)
    routes = read_routed_experts(*answer(prompt_length, num_generated, rows[start:]), **MODEL, prompt_start=start)
    captured = np.arange(start, prompt_length + num_generated - 1)
    assert np.flatnonzero(routes.captured).tolist() == captured.tolist()
    assert len(routes) == prompt_length + num_generated and routes.layers == (1, 3)
    assert np.array_equal(routes.to_int64()[captured], rows[captured][:, [1, 3]])


def test_a_short_answer_is_an_error_that_names_the_counts():
    for num_rows in (0, 3, 6):
        with pytest.raises(RoutesError, match=rf"request 7 \(4 prompt and 4 generated.*: {num_rows} rows.*expected 7"):
            read_routed_experts(*answer(4, 4, engine_rows(num_rows)), **MODEL)
    with pytest.raises(RoutesError, match="4 rows of routed experts from prompt token 2 on, expected 5"):
        read_routed_experts(*answer(4, 4, engine_rows(4)), **MODEL, prompt_start=2)


@pytest.mark.parametrize(("num_rows", "kept"), [(7, 7), (6, 4), (4, 4), (3, 0), (0, 0)])
def test_a_short_answer_keeps_what_can_be_placed(num_rows, kept):
    """The rows of the prompt come together; after a gap nobody knows which generated token a row belongs to."""
    rows = engine_rows(num_rows)
    routes = read_routed_experts(*answer(4, 4, rows), **MODEL, missing="live")
    assert len(routes) == 8 and np.flatnonzero(routes.captured).tolist() == list(range(kept))
    assert np.array_equal(routes.to_int64()[:kept], rows[:kept][:, [1, 3]])


def test_rows_past_a_stop_string_are_dropped_only_where_they_may_occur():
    rows = engine_rows(9)
    with pytest.raises(RoutesError, match="9 rows of routed experts, expected 7"):
        read_routed_experts(*answer(4, 4, rows), **MODEL, missing="live")
    routes = read_routed_experts(*answer(4, 4, rows), **MODEL, trailing=True)
    assert routes == read_routed_experts(*answer(4, 4, rows[:7]), **MODEL)


def test_rows_that_nobody_wrote_are_refused():
    rows = engine_rows(7)
    rows[5, 3] = 0
    with pytest.raises(RoutesError, match=r"request 7 .*token 5, layer 3: expert 0 appears twice in \[0, 0\]"):
        read_routed_experts(*answer(4, 4, rows), **MODEL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(layers=(1, 2)), "layer 3 has routes in the engine, but no experts in the policy"),
        (dict(layers=(1, 5)), r"shape \(7, 5, 2\) have no .* with layers \(1, 5\)"),
        (dict(top_k=3), r"shape \(7, 5, 2\) have no \[tokens, layers, top_k=3\]"),
        (dict(num_experts=4), "is outside 0 … 3"),
    ],
)
def test_another_model_is_refused(change, message):
    with pytest.raises(RoutesError, match=message):
        read_routed_experts(*answer(4, 4, engine_rows(7)), **MODEL | change)


def test_no_routes_at_all_say_what_the_engine_needs():
    with pytest.raises(RoutesError, match="request 7: .* no routed experts.*enable_return_routed_experts=True"):
        read_routed_experts(*answer(4, 4, None), **MODEL)
