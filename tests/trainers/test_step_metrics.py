"""Metrics of a logging step of several batches and passes, which TRL would average whatever their numbers of tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_support_replay.checks.replay_metrics import StepMetrics, count, largest, mean, over_processes


def metrics_of(values):
    values = np.array(values)
    return {
        "mean": mean(values.sum(), len(values)),
        "largest": largest(values),
        "count": count(len(values)),
    }


passes = st.lists(st.lists(st.lists(st.integers(0, 50), max_size=5), min_size=2, max_size=2), min_size=1, max_size=4)


@given(passes)
def test_any_way_of_splitting_gives_what_all_together_give(parts):
    """`parts[pass][process]` are the values that one process has in one pass."""
    step = StepMetrics()
    for processes in parts:
        rows = [[part for metric in metrics_of(own).values() for part in metric.parts] for own in processes]
        step.add(over_processes(metrics_of(processes[0]), lambda row, rows=rows: np.array(rows)))
    together = [value for processes in parts for own in processes for value in own]
    found = step.take()
    assert step.take() == {}
    assert found["count"] == [len(together)]
    if together:
        assert found["mean"] == [pytest.approx(np.mean(together))] and found["largest"] == [max(together)]
    else:
        assert math.isnan(found["mean"][0]) and math.isnan(found["largest"][0])


def test_a_logging_step_of_several_batches(build, tiny_model_path):
    """Two optimizer steps of two micro-batches each, with a generation for each micro-batch."""
    trainer = build(
        tiny_model_path,
        use_vllm=False,
        top_p=0.9,
        logging_steps=2,
        gradient_accumulation_steps=2,
        steps_per_generation=1,
        max_completion_length=30,
    )
    kept, samples, gaps, entropies = trainer._keep_samples, [], [], []
    check, log = trainer._check_replay, trainer._log

    def keep(collected):
        collected.num_synthetic = len(samples)  # 0, 4, 8, 12
        samples.extend(collected.samples)
        kept(collected)

    def check_and_note(replayed, batch, *rest):
        mask = np.array([[i < len(s.supports) for i in range(replayed.shape[1])] for s in batch["support_samples"]])
        gaps.extend(abs(replayed - batch["sampling_per_token_logps"]).double().numpy()[mask])
        check(replayed, batch, *rest)

    def log_and_note(metrics):
        if "support/entropy" in metrics:
            entropies.append(metrics["support/entropy"].parts)
        log(metrics)

    trainer._keep_samples, trainer._check_replay, trainer._log = keep, check_and_note, log_and_note
    trainer.train()
    logs = [log for log in trainer.state.log_history if "support/size_mean" in log]
    sizes = np.concatenate([sample.supports.sizes for sample in samples])
    lengths = [sum(len(sample.supports) for sample in samples[i : i + 4]) for i in range(0, 16, 4)]
    assert len(logs) == 1 and len(samples) == 16 and len(set(lengths)) > 1
    assert logs[0]["support/size_mean"] == pytest.approx(sizes.mean(), rel=1e-12)
    assert logs[0]["support/size_max"] == sizes.max()
    assert logs[0]["support/singleton_fraction"] == pytest.approx((sizes == 1).mean(), rel=1e-12)
    assert logs[0]["support/synthetic_eos"] == 24
    assert len(gaps) == len(sizes)
    assert logs[0]["support/logprob_gap_max"] == pytest.approx(max(gaps), rel=1e-6)
    assert logs[0]["support/logprob_gap_mean"] == pytest.approx(np.mean(gaps), rel=1e-6)
    totals, counts = np.array(entropies).T
    assert counts.tolist() == lengths
    assert logs[0]["support/entropy"] == pytest.approx(totals.sum() / counts.sum(), rel=1e-12)
    assert abs(logs[0]["support/entropy"] - np.mean(totals / counts)) > 1e-6  # what an average of averages would say
