"""`explain` names a cause only when it was undone, and tells what was tried in vain."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.analysis.conftest import dense, edited, moe, sample  # noqa: F401
from trl_support_replay.analysis.audit import token_scores
from trl_support_replay.analysis.audit.token_scores import RecordedTokens, TokenScorer
from trl_support_replay.checks.replay_check import explain
from trl_support_replay.traces.support import SupportRows


def explained(traces, model, temperature=1.0, routes=False, stale=None, same_weights=True):
    """What `explain` says of traces that `model` scores; without `same_weights` it can score them no more."""
    tokens = RecordedTokens.of(traces)
    shape = len(traces), max(len(trace.completion_ids) for trace in traces)
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[tokens.trace, tokens.position] = True

    def padded(values):
        full = torch.zeros(shape, dtype=torch.float64)
        full[tokens.trace, tokens.position] = torch.from_numpy(values)
        return full

    def score(at, replay_routes):
        return padded(TokenScorer(model, at).score(tokens, replay_routes).logprobs)

    return explain(
        score(temperature, routes),
        padded(tokens.recorded),
        mask,
        traces,
        temperature,
        (lambda at: score(at, routes)) if same_weights else None,
        (lambda: score(temperature, False)) if routes else None,
        stale,
        5e-5,
        lambda tensor: tensor,
    )


def test_dropout_is_noise(dense, monkeypatch):  # noqa: F811
    traces = sample(dense).traces
    model = copy.deepcopy(dense).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    monkeypatch.setattr(token_scores, "evaluating", lambda _: torch.no_grad())
    said = explained(traces, model)
    assert said.startswith("The policy's own scores are noisy") and "lora_dropout" in said


def test_routes_of_other_tokens_are_told_by_the_live_routers(moe):  # noqa: F811
    def shifted(trace):
        return replace(trace, routes=trace.routes.take(np.roll(np.arange(len(trace.routes)), 1)))

    said = explained(edited(sample(moe, routes=True), shifted).traces, moe, routes=True)
    assert said.startswith("The recorded routes are not those of these tokens: through the live routers")


def test_another_temperature_says_that_a_factor_of_the_logits_looks_the_same(dense):  # noqa: F811
    said = explained(sample(dense, temperature=0.8).traces, dense)
    assert "at temperature=0.8 the mean gap falls" in said and "the trainer scores at temperature=1." in said
    assert "A factor of the logits" in said


def test_a_temperature_that_fits_a_few_tokens_is_chance(dense):  # noqa: F811
    said = explained(sample(dense, temperature=0.5, num=1, tokens=4).traces, dense)
    assert said.startswith("Nothing that was tried explains") and "temperature=" in said


def test_one_completion_with_another_prompt_is_placed(dense):  # noqa: F811
    traces = sample(dense).traces
    traces[3] = replace(traces[3], prompt_ids=traces[3].prompt_ids[::-1].copy())
    assert explained(traces, dense).startswith("The gap is in some of the completions")


def test_supports_that_a_tie_has_made_too_large_are_placed(dense):  # noqa: F811
    source = sample(dense)
    largest = max(trace.supports.sizes.max() for trace in source.traces)

    def with_one_more(trace):
        rows = trace.supports.to_lists()
        more = [[*row, next(v for v in range(99) if v not in row)] if len(row) == largest else row for row in rows]
        return replace(trace, supports=SupportRows.from_ragged(more))

    said = explained(edited(source, with_one_more).traces, dense)
    assert said.startswith("The gap is in the supports of the largest size")


@pytest.mark.parametrize("routes", [False, True])
def test_other_weights_are_not_tried_and_not_called_the_cause(dense, moe, routes):  # noqa: F811
    model = moe if routes else dense
    traces = sample(model, routes=routes).traces
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.03 * parameter.std() * torch.randn_like(parameter))
    said = explained(traces, other, routes=routes)
    assert said.startswith("Nothing that was tried explains the mean gap of")
    tried, not_tried = said.split("Not tried: ")
    for undone in ("records shifted by", "scored again (0 from", "temperature=", "without some of the completions"):
        assert undone in tried
    assert ("live routers" in tried) == routes and ("routed_experts_replay is off" in not_tried) != routes
    assert "other weights than the policy's" in not_tried and "likely" not in said


def test_weights_that_are_gone_are_not_scored_with(dense):  # noqa: F811
    traces = sample(dense, temperature=1.3).traces
    assert "another temperature" in explained(traces, dense)
    tried, not_tried = explained(traces, dense, same_weights=False).split("Not tried: ")
    assert "records shifted by" in tried and "temperature" not in tried and "scored again" not in tried
    assert "DeepSpeed has updated the weights since" in not_tried and "routed_experts_replay" not in not_tried


def test_known_staleness_comes_first(dense):  # noqa: F811
    said = explained(sample(dense, num=2).traces, dense, stale="it holds the weights of step 0")
    assert said == "The engine is stale: it holds the weights of step 0."
