"""Each injected fault is named, and nothing else is."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

from trl_support_replay.analysis.audit import audit_traces
from trl_support_replay.analysis.audit.gaps import PARTS
from trl_support_replay.analysis.audit.token_scores import RecordedTokens, TokenScorer
from trl_support_replay.policy.replay_head import add_replay_head
from trl_support_replay.traces.support import SupportRows

from .conftest import edited, sample


def faults(audit):
    return [finding.cause for finding in audit.findings if finding.is_fault]


def mean(audit, part):
    return np.abs(audit.parts[part]).mean()


def test_truncation_only(dense):
    audit = audit_traces(sample(dense), dense)
    assert [f.cause for f in audit.findings] == ["truncation"] and "replay removes" in audit.verdict
    assert np.abs(audit.parts["numerics"]).max() < 1e-4 < mean(audit, "truncation")
    np.testing.assert_allclose(audit.parts["truncation"], audit.scores.live.log_mass, atol=1e-5)
    assert (audit.parts["routes"] == 0).all() and (audit.parts["staleness"] == 0).all()


def test_rounding_is_what_a_trainer_takes_for_it(dense):
    source = sample(dense)

    def off(tokens):
        def edit(trace):
            values = trace.sampling_logprobs.copy()
            values[tokens] += 3e-4
            return replace(trace, sampling_logprobs=values)

        return edit

    # At one token of a completion in twelve; at every token.
    rare = replace(source, traces=[off(slice(3, 4))(source.traces[0]), *source.traces[1:]])
    assert faults(audit_traces(rare, dense)) == []
    assert faults(audit_traces(edited(source, off(slice(None))), dense)) != []


def test_no_gap(dense):
    audit = audit_traces(sample(dense, top_p=1.0), dense)
    assert audit.findings == [] and "no gap beyond rounding" in audit.verdict


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_another_temperature(dense, temperature):
    audit = audit_traces(sample(dense, temperature=temperature, said=1.0), dense)
    assert faults(audit) == ["temperature"]
    assert audit.findings[0].value == pytest.approx(temperature, rel=0.01)
    assert f"{audit.findings[0].value:.3g}" in audit.verdict


@pytest.mark.parametrize("shift", [1, -1])
def test_shifted_records(dense, shift):
    def shifted(trace):
        return replace(trace, sampling_logprobs=np.roll(trace.sampling_logprobs, shift))

    audit = audit_traces(edited(sample(dense), shifted), dense)
    assert faults(audit) == ["shift"] and audit.findings[0].value == shift


def test_stale_weights_with_the_weights_that_sampled(dense, moved):
    audit = audit_traces(sample(dense), moved, dense)
    assert faults(audit) == ["staleness"] and "Stale weights" in audit.verdict
    assert np.abs(audit.parts["numerics"]).max() < 1e-4 < mean(audit, "staleness")


def test_stale_weights_alone_are_unexplained_and_named_as_not_tried(dense, moved):
    audit = audit_traces(sample(dense), moved)
    assert faults(audit) == ["unexplained"] and audit.verdict.startswith("Nothing that was tried explains")
    tried, not_tried = audit.verdict.split("Not tried: ")
    assert not_tried.startswith("other weights")
    for undone in (
        "records shifted by",
        "temperature=",
        "the model in bfloat16",
        "the model in float16",
        "without some",
    ):
        assert undone in tried
    assert "live routers" not in tried


def of_two(first, second, steps, **more):
    """Three steps' traces of each of two models."""
    ones, others = sample(first), sample(second, seed=5)
    return replace(ones, traces=ones.traces + others.traces, steps=np.repeat(steps, 4), **more)


def test_other_weights_of_some_steps_are_told_by_the_steps_that_fit(dense, moved):
    audit = audit_traces(of_two(dense, moved, [0, 1, 2, 10, 11, 12]), dense)
    assert faults(audit) == ["staleness"]
    assert "Other weights: the model fits the traces of 3 of 6 training steps (first: 0)" in audit.verdict


@pytest.mark.parametrize(
    ("steps", "more"),
    [([0, 1, 2, 10, 11, 12], {"step_name": "shard"}), ([0, 2, 4, 1, 3, 5], {})],
    ids=["shards of one capture have the same weights", "weights do not come back"],
)
def test_other_weights_are_not_blamed_without_steps_that_show_them(dense, moved, steps, more):
    audit = audit_traces(of_two(dense, moved, steps, **more), dense)
    assert faults(audit) == ["place"] and f"The gap is in some {audit.source.step_name}s" in audit.verdict
    assert "over 3 of 6" in audit.verdict and "weights" not in audit.verdict


def test_other_weights_are_not_blamed_for_one_completion_of_a_step(dense, moved):
    fresh, stale = sample(dense), sample(moved)
    audit = audit_traces(replace(fresh, traces=[*fresh.traces[:-1], stale.traces[-1]]), dense)
    assert faults(audit) == ["place"] and "weights" not in audit.verdict


def test_a_step_without_any_choice_shows_no_weights(dense, moved):
    source = sample(moved)

    def sure(trace):
        supports = SupportRows.from_ragged([[int(token)] for token in trace.completion_ids])
        return replace(trace, supports=supports, sampling_logprobs=np.zeros_like(trace.sampling_logprobs))

    traces = [sure(trace) if step == 0 else trace for trace, step in zip(source.traces, source.steps, strict=True)]
    assert faults(audit_traces(replace(source, traces=traces), dense)) == ["unexplained"]


def test_a_sampler_that_did_not_sample_is_told(dense, moved):
    audit = audit_traces(sample(dense), dense, moved)
    assert faults(audit) == ["unexplained"] and audit.verdict.startswith("The given sampler is not what sampled")
    other = copy.deepcopy(moved)
    other.lm_head.weight.data.mul_(0.9)
    audit = audit_traces(sample(dense), moved, other)
    assert faults(audit) == ["unexplained"] and "the given sampler is not what sampled" in audit.verdict


def test_stale_weights_are_named_beside_another_fault(dense, moved):
    audit = audit_traces(sample(dense, temperature=0.7, said=1.0), moved, dense)
    assert sorted(faults(audit)) == ["staleness", "temperature"]


def test_an_engine_in_half_precision(dense):
    audit = audit_traces(sample(copy.deepcopy(dense).to(torch.bfloat16)), dense)
    assert faults(audit) == ["half_precision"] and "bfloat16" in audit.verdict


def test_weights_rounded_to_half_precision(dense):
    audit = audit_traces(sample(copy.deepcopy(dense).to(torch.bfloat16).float()), dense)
    assert faults(audit) == ["half_precision"] and "bfloat16" in audit.verdict


def test_routes_that_the_engine_chose_otherwise(moe):
    source = sample(moe, routes=True)
    rng = np.random.default_rng(0)

    def engine(trace):
        """Every tenth token went through two other experts."""
        routes = trace.routes.take(np.arange(len(trace.routes)))
        turned = rng.random(len(routes)) < 0.1
        routes.experts[turned] = (routes.experts[turned] + 1) % 8
        return replace(trace, routes=routes)

    source = edited(source, engine)
    tokens = RecordedTokens.of(source.traces)
    logprobs = TokenScorer(moe, 1.0).score(tokens, replay_routes=True).logprobs.astype(np.float32)
    bounds = np.cumsum(np.bincount(tokens.trace))[:-1]
    traces = [replace(t, sampling_logprobs=v) for t, v in zip(source.traces, np.split(logprobs, bounds), strict=True)]
    audit = audit_traces(replace(source, traces=traces), moe)
    assert {f.cause for f in audit.findings} == {"truncation", "routes"} and "replay removes" in audit.verdict
    assert np.abs(audit.parts["numerics"]).max() < 1e-4 < mean(audit, "routes")
    assert 0.8 < audit.scores.replayed.agreement < 0.95
    # The same over traces of unequal lengths, whether each is a batch or all are one.
    lengths = [2, *(len(trace.completion_ids) for trace in traces[1:])]
    uneven = RecordedTokens.of([cut(trace, length) for trace, length in zip(traces, lengths, strict=True)])
    agreements = [TokenScorer(moe, 1.0, size).score(uneven, replay_routes=True).agreement for size in (1, 8)]
    assert agreements[0] == agreements[1]


def cut(trace, length):
    """The first tokens of a completion."""
    parts = ("completion_ids", "loss_mask", "sampling_logprobs", "supports")
    return replace(
        trace,
        routes=trace.routes[: len(trace.prompt_ids) + length],
        **{name: getattr(trace, name)[:length] for name in parts},
    )


def test_an_observation_that_the_engine_saw_otherwise_leaves_its_gap_in_the_later_turns(dense):
    def seen_otherwise(trace):
        """Tokens 16 to 18 are no part of the loss, and are others than those that the engine went on from."""
        ids, loss_mask = trace.completion_ids.copy(), trace.loss_mask.copy()
        ids[16:19], loss_mask[16:19] = (ids[16:19] + 7) % 90 + 3, False
        keep = np.where(loss_mask, np.arange(len(ids)), -1)
        recorded = np.where(loss_mask, trace.sampling_logprobs, np.nan).astype(np.float32)
        return replace(
            trace,
            completion_ids=ids,
            loss_mask=loss_mask,
            supports=trace.supports.take(keep),
            sampling_logprobs=recorded,
        )

    audit = audit_traces(edited(sample(dense), seen_otherwise), dense)
    assert faults(audit) == ["place"] and "The gap is in the turns after the first one" in audit.verdict
    assert audit.findings[0].left < 1e-5


def test_right_routes_leave_nothing(moe):
    audit = audit_traces(sample(moe, routes=True), moe)
    assert faults(audit) == [] and audit.scores.replayed.agreement > 0.99


@pytest.mark.parametrize("how", ["next token's", "next sample's"])
def test_wrong_routes(moe, how):
    source = sample(moe, routes=True)
    if how == "next token's":

        def wrong(trace):
            order = np.roll(np.arange(len(trace.routes)), 1)
            return replace(trace, routes=trace.routes.take(order))

        source = edited(source, wrong)
    else:
        length = min(len(t.routes) for t in source.traces)
        routes = [t.routes for t in source.traces]
        swapped = [
            replace(t, routes=t.routes.take(np.arange(len(t.routes))).concatenate([other[:length], t.routes[length:]]))
            for t, other in zip(source.traces, routes[1:] + routes[:1], strict=True)
        ]
        source = replace(source, traces=swapped)
    audit = audit_traces(source, moe)
    assert faults(audit) == ["wrong_routes"] and "live routers" in audit.verdict
    assert audit.scores.replayed.agreement < 0.9


def test_parts_add_up_and_the_model_keeps_its_mode(moe, moved, dense):
    for audit in (audit_traces(sample(moe, routes=True), moe), audit_traces(sample(dense), moved, dense)):
        np.testing.assert_allclose(sum(audit.parts[p] for p in PARTS), audit.parts["total"], atol=1e-9)
    moved.train()
    audit_traces(sample(dense, num=2), moved)
    assert moved.training


def test_parts_of_the_model_keep_modes_of_their_own(dense, moved):
    moved.train()
    moved.model.layers[0].eval()
    audit_traces(sample(dense, num=2), moved)
    assert moved.training and not moved.model.layers[0].training


@pytest.mark.needs("peft")
def test_a_model_that_transformers_gave_an_adapter(dense):
    from peft import LoraConfig

    model = copy.deepcopy(dense)
    model.add_adapter(LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    source = sample(model)
    assert not faults(audit_traces(source, model)) and faults(audit_traces(source, dense))


def test_half_precision_is_tried_with_a_model_of_a_trainer(dense):
    model = copy.deepcopy(dense)
    add_fused_lm_head(model)  # as TRL and the trainer do: the copy of such a model would run the original
    add_replay_head(model)
    audit = audit_traces(sample(copy.deepcopy(dense).to(torch.bfloat16)), model)
    assert faults(audit) == ["half_precision"] and "bfloat16" in audit.verdict


def test_the_scorers_batches_do_not_matter(dense):
    source = sample(dense)
    one, many = audit_traces(source, dense, batch_size=1), audit_traces(source, dense, batch_size=5)
    for part in PARTS:
        np.testing.assert_allclose(one.parts[part], many.parts[part], atol=1e-5)


def test_observations_and_synthetic_ends_are_no_tokens_of_the_audit(dense):
    source = sample(dense)

    def observed(trace):
        loss_mask = trace.loss_mask.copy()
        loss_mask[2:4] = False
        keep = np.where(loss_mask, np.arange(len(loss_mask)), -1)
        keep[-1] = -1  # nobody sampled the last one
        recorded = np.where(keep >= 0, trace.sampling_logprobs, np.nan).astype(np.float32)
        return replace(trace, loss_mask=loss_mask, supports=trace.supports.take(keep), sampling_logprobs=recorded)

    audit = audit_traces(edited(source, observed), dense)
    assert len(audit.tokens) == sum(len(t.completion_ids) - 3 for t in source.traces)
    assert faults(audit) == [] and np.abs(audit.parts["numerics"]).max() < 1e-4


def test_no_recorded_token_at_all(dense):
    source = edited(sample(dense, num=2), lambda t: replace(t, loss_mask=np.zeros_like(t.loss_mask)))
    audit = audit_traces(source, dense)
    assert len(audit.tokens) == 0 and audit.findings == []
