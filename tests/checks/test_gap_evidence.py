"""Faults that are smaller than the rounding of half precision stop a run, and rounding alone does not."""

import copy
import math

import numpy as np
import pytest
import torch

from benchmarks.check_power import Pool, new_check
from tests.analysis.conftest import dense, sample  # noqa: F401
from tests.ranks import run_on_ranks
from trl_support_replay.analysis.audit.temperature import logprobs_at_temperature
from trl_support_replay.analysis.audit.token_scores import RecordedTokens, TokenScorer
from trl_support_replay.checks.replay_check import ReplayCheck

BATCH = 24


@pytest.fixture(scope="module")
def engine(dense):  # noqa: F811
    """What a bfloat16 model really sampled and recorded, and the float32 model's scores of it."""
    traces = sample(copy.deepcopy(dense).to(torch.bfloat16), num=192).traces
    tokens = RecordedTokens.of(traces)
    return traces, tokens, TokenScorer(dense, 1.0).score(tokens)


def pool(engine, replayed, **kwargs):
    return Pool(engine[0], engine[1], replayed, batch=BATCH, **kwargs)


def batches_until(check, faulty, rng, most=50):
    for batch in range(1, most + 1):
        fault = faulty.show(check, rng)
        if fault:
            return batch, fault
    return math.inf, None


def test_the_ratio_has_mean_one_and_its_logarithm_has_not(engine):
    _, tokens, scores = engine
    gap = scores.logprobs - tokens.recorded
    error = gap.std() / math.sqrt(len(gap))
    assert abs(np.expm1(gap).mean()) < 3 * error
    assert np.abs(gap).mean() > 5e-3  # there is rounding to look through


def test_a_thousand_healthy_batches_pass(engine):
    healthy, check, rng = pool(engine, engine[2].logprobs), new_check(), np.random.default_rng(0)
    assert [healthy.show(check, rng) for _ in range(1000)] == [None] * 1000


@pytest.mark.parametrize(("kept", "ids"), [(0.95, "more"), (1 / 0.95, "fewer")])
def test_five_percent_of_mass_stop_the_first_batch(engine, kept, ids):
    faulty = pool(engine, engine[2].logprobs + math.log(kept))
    batch, fault = batches_until(new_check(), faulty, np.random.default_rng(1))
    assert batch == 1 and f"taken over {ids} ids than the engine drew from" in fault


@pytest.mark.parametrize(("change", "policy", "engines"), [(1.02, "sharper", "higher"), (1 / 1.02, "flatter", "lower")])
def test_two_percent_of_temperature_stop_the_run(engine, change, policy, engines):
    _, tokens, scores = engine
    # The engine's temperature is `change` times the trainer's.
    faulty = pool(engine, logprobs_at_temperature(tokens, scores.candidates, 1.0, 1 / change))
    batch, fault = batches_until(new_check(), faulty, np.random.default_rng(2))
    assert batch <= 20 and f"The policy is {policy}" in fault and f"temperature is {engines}" in fault


def test_weights_that_fall_behind_are_told_by_the_growth_of_the_gap(engine, dense):  # noqa: F811
    _, tokens, scores = engine
    moved = copy.deepcopy(dense)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(5e-3 * parameter.std() * torch.randn_like(parameter))
    replayed = TokenScorer(moved, 1.0).score(tokens).logprobs
    grown = np.square(replayed - tokens.recorded).mean() / np.square(scores.logprobs - tokens.recorded).mean()
    assert 2.5 < grown < 6  # a fault of the size of rounding
    healthy, check, rng = pool(engine, scores.logprobs), new_check(), np.random.default_rng(3)
    assert not any(healthy.show(check, rng) for _ in range(20))
    batch, fault = batches_until(check, pool(engine, replayed), rng)
    assert batch <= 20 and "The gap has become" in fault


def test_records_shifted_by_one_stop_the_first_batch(engine):
    faulty = pool(engine, engine[2].logprobs, shift=True)
    batch, fault = batches_until(new_check(), faulty, np.random.default_rng(4))
    assert batch == 1 and "differ by" in fault


def batch_of(engine, num=32):
    traces, tokens, scores = engine
    width = max(len(trace.completion_ids) for trace in traces)
    replayed, recorded = torch.zeros(num, width), torch.zeros(num, width)
    mask = torch.zeros(num, width, dtype=torch.bool)
    for b in range(num):
        length = len(traces[b].completion_ids)
        replayed[b, :length] = torch.from_numpy(scores.logprobs[tokens.trace == b])
        recorded[b, :length] = torch.from_numpy(traces[b].sampling_logprobs)
        mask[b, :length] = True
    return replayed, recorded, mask, traces[:num]


def test_one_wrong_sequence_among_many_is_found_though_the_mean_is_small(engine):
    replayed, recorded, mask, samples = batch_of(engine)
    row = int(mask.sum(dim=1).argmax())
    recorded[row] = torch.where(mask[row], recorded[row] - 0.5 * (-1.0) ** torch.arange(mask.shape[1]), 0.0)
    found = new_check().look(replayed, recorded, mask, samples)
    assert found.statistics.mean < 0.12 < found.statistics.worst_sequence and "differ by" in found.fault


def test_a_single_rounded_token_of_a_short_sequence_is_no_wrong_sequence(engine):
    replayed, recorded, mask, samples = batch_of(engine)
    mask[0, 1:] = False
    recorded[0, 0] = replayed[0, 0] - 0.5
    assert new_check().look(replayed, recorded, mask, samples).fault is None


def test_a_sync_that_is_known_to_be_skipped_is_a_fault_only_where_rounding_would_hide_it(engine):
    replayed, recorded, mask, samples = batch_of(engine)
    found = new_check().look(replayed, recorded, mask, samples, stale="it holds the weights of step 0")
    assert found.fault == "Engine and policy hold different weights."
    full = ReplayCheck(full_precision=True, value=None, gather=lambda tensor: tensor)
    assert full.look(replayed, replayed, mask, samples, stale="it holds the weights of step 0").fault is None


@pytest.mark.parametrize("value", [math.nan, 800.0])
def test_scores_that_are_no_numbers_are_a_fault(engine, value):
    replayed, recorded, mask, samples = batch_of(engine)
    replayed[1, 0] = value
    assert "differ by" in new_check().look(replayed, recorded, mask, samples).fault


def test_a_larger_tolerance_scales_the_margins(engine):
    faulty, rng = pool(engine, engine[2].logprobs + math.log(0.95)), np.random.default_rng(1)
    check = ReplayCheck(full_precision=False, value=12 * 0.12, gather=lambda tensor: tensor)
    assert not any(faulty.show(check, rng) for _ in range(20))


def test_an_empty_batch_changes_nothing(engine):
    replayed, recorded, mask, samples = batch_of(engine)
    found = new_check().look(replayed, recorded, torch.zeros_like(mask), samples)
    assert found.statistics.num_tokens == 0 and found.fault is None


def test_all_processes_decide_as_one_process_would(engine):
    replayed, recorded, mask, samples = batch_of(engine)
    batches = [
        (replayed + torch.where(mask, math.log(kept), 0.0), recorded, mask, samples) for kept in (1.0, 1.0, 0.97)
    ]
    check = new_check()
    alone = [(found.fault, found.signs) for found in (check.look(*batch) for batch in batches)]
    assert alone[0][0] is None and "more ids" in alone[2][0]
    first, second = run_on_ranks(2, "tests.checks.rank_cases:look", batches)
    assert first == second
    for (fault, signs), (expected, of_one) in zip(first, alone, strict=True):
        assert fault == expected and signs == pytest.approx(of_one, rel=1e-9)
