"""Penalties and biases in training with colocated vLLM: the policy is scored with the engine's shifts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import trl_support_replay.trainers.grpo as grpo_module
from trl_support_replay import SupportReplayRLOOConfig, SupportReplayRLOOTrainer
from trl_support_replay.checks.replay_check import ReplayGapError
from trl_support_replay.settings.contract import UnreplayableSettingError
from trl_support_replay.traces.columns import Trace, traces_to_table
from trl_support_replay.traces.errors import TraceSchemaError
from trl_support_replay.traces.shifts import LogitShifts
from trl_support_replay.traces.support import SupportRows

# Completions of these few tokens, which therefore come again and again: by chance they would not.
BIAS = {1000 + i: 100.0 + i / 8 for i in range(12)}
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.5, "logit_bias": BIAS}
RLOO = {"trainer_cls": SupportReplayRLOOTrainer, "config_cls": SupportReplayRLOOConfig}
SETTINGS = {"use_vllm": True, "top_k": 20, "top_p": 0.9, "max_completion_length": 12}


@pytest.mark.needs("vllm")
@pytest.mark.parametrize(
    "shifts",
    [
        {"generation_kwargs": {"logit_bias": BIAS}},
        {"repetition_penalty": 1.01, "generation_kwargs": {"logit_bias": BIAS}},
        {"repetition_penalty": 1.01, "generation_kwargs": PENALTIES, "beta": 0.1, "num_iterations": 2},
        {"repetition_penalty": 1.01, "generation_kwargs": PENALTIES, "beta": 0.1, **RLOO},
    ],
    ids=["bias", "repetition", "all", "RLOO"],
)
def test_replayed_equals_recorded(build, vllm, tiny_llama_path, shifts):
    trainer = build(tiny_llama_path, **SETTINGS, **shifts)
    trainer.train()
    gaps = [log["support/logprob_gap_max"] for log in trainer.state.log_history if "support/logprob_gap_max" in log]
    assert gaps and max(gaps) <= 1e-4
    assert not any("support/log_mass" in log for log in trainer.state.log_history)


@pytest.mark.needs("vllm")
@pytest.mark.parametrize(
    "kept", [None, LogitShifts(1.01, 0.7, 0.0, BIAS), LogitShifts(1.0, 0.7, 0.5, BIAS)], ids=["none", "two", "three"]
)
def test_with_fewer_shifts_the_run_stops(build, vllm, tiny_llama_path, monkeypatch, kept):
    collect, seen = grpo_module.collect_samples, []

    def forgetful(*args, **kwargs):
        collected = collect(*args, **kwargs)
        seen.extend(collected.samples)
        collected.samples = [dataclasses.replace(sample, shifts=kept) for sample in collected.samples]
        return collected

    monkeypatch.setattr(grpo_module, "collect_samples", forgetful)
    shifts = {"repetition_penalty": 1.01, "generation_kwargs": PENALTIES}
    trainer = build(tiny_llama_path, **SETTINGS, **shifts, max_steps=1)
    with pytest.raises(ReplayGapError):
        trainer.train()
    assert seen[0].shifts == LogitShifts(1.01, 0.7, 0.5, BIAS)


def test_a_table_does_not_take_shifted_traces():
    one = np.array([1], np.int32)
    trace = Trace(one, one, one > 0, -one.astype(np.float32), SupportRows.from_ragged([[1, 2]]))
    assert len(traces_to_table([trace], model="m", sampling={"temperature": 1.0}, engine={})) == 1
    shifted = dataclasses.replace(trace, shifts=LogitShifts(repetition_penalty=1.5))
    with pytest.raises(TraceSchemaError, match=r"Trace 0 was sampled with LogitShifts\(repetition_penalty=1.5"):
        traces_to_table([shifted], model="m", sampling={"temperature": 1.0}, engine={})


@pytest.mark.parametrize(
    "settings",
    [
        {"use_vllm": False, "top_k": 20},
        {"use_vllm": True},
        {"use_vllm": True, "top_k": 20, "vllm_mode": "server"},
        {"use_vllm": True, "top_k": 20, "save_traces": True},
        {"use_vllm": True, "top_k": 20, "support_growth": True},
        {"use_vllm": True, "top_k": 20, "beta": 0.1, "kl_scope": "full"},
    ],
    ids=str,
)
def test_elsewhere_shifts_are_refused(build, tiny_llama_path, settings):
    with pytest.raises(UnreplayableSettingError, match=r"repetition_penalty=1.5 cannot be replayed: it shifts logits"):
        build(tiny_llama_path, **settings, repetition_penalty=1.5)


def test_conversations_are_refused(build, tiny_llama_path):
    with pytest.raises(UnreplayableSettingError, match="repetition_penalty=1.5 .* not recorded with rollout_func"):
        build(tiny_llama_path, use_vllm=True, top_k=20, repetition_penalty=1.5, rollout_func=lambda *args: {})
