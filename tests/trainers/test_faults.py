"""Each deliberate fault stops the run where it happens, with an error that names the cause."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict

import trl_support_replay.engines.vllm_captures as vllm_captures
import trl_support_replay.engines.vllm_engine as vllm_engine
import trl_support_replay.trainers.grpo as trainer_module
from trl_support_replay.checks.replay_check import ReplayGapError
from trl_support_replay.engine_outputs.errors import SupportCaptureError
from trl_support_replay.engine_outputs.vllm_capture import Capture
from trl_support_replay.rollouts.collect import collect_samples
from trl_support_replay.settings.contract import UnreplayableSettingError
from trl_support_replay.settings.preflight import InputError
from trl_support_replay.traces.support import SupportError, SupportRows

VLLM = {"use_vllm": True, "max_completion_length": 16, "top_k": 20, "top_p": 0.9}
HF = {"use_vllm": False, "top_p": 0.9}


def steps_done(trainer):
    return trainer.state.global_step


@pytest.mark.parametrize(
    ("rows", "message"),
    [({"question": ["a"]}, r"train_dataset has no 'prompt' column \(it has: question\)"), ({"prompt": []}, "no rows")],
)
def test_a_dataset_without_prompts_is_refused_before_the_model_is_loaded(build, rows, message):
    with pytest.raises(InputError, match=message):
        build("no/model", use_vllm=False, top_p=0.9, train_dataset=Dataset.from_dict(rows))


def test_splits_in_the_place_of_one_are_named(build):
    splits = DatasetDict({"train": Dataset.from_dict({"prompt": ["a"]}), "test": Dataset.from_dict({"prompt": ["a"]})})
    with pytest.raises(InputError, match="train_dataset is a dictionary of the splits train, test"):
        build("no/model", use_vllm=False, top_p=0.9, train_dataset=splits)


def test_a_skipped_weight_sync_is_called_stale(build, vllm, tiny_llama_path, monkeypatch):
    trainer = build(tiny_llama_path, **VLLM, learning_rate=1e-3, max_steps=3)
    sync = vllm_engine.SupportVLLMGeneration.sync_weights
    calls = []

    def sync_once(self):
        calls.append(1)
        if len(calls) == 1:
            sync(self)

    monkeypatch.setattr(vllm_engine.SupportVLLMGeneration, "sync_weights", sync_once)
    with pytest.raises(ReplayGapError, match="stale: it holds the weights of step 0 while the policy is at step 1"):
        trainer.train()
    assert steps_done(trainer) == 1


def test_a_sync_without_effect_is_found_by_the_gap(build, vllm, tiny_llama_path, monkeypatch):
    trainer = build(tiny_llama_path, **VLLM)
    with torch.no_grad():  # the policy moves on, and the engine is told nothing
        trainer.model.model.layers[1].mlp.down_proj.weight.mul_(5)
    monkeypatch.setattr(trainer.vllm_generation, "_reload_on_cpu", lambda: None)
    with pytest.raises(ReplayGapError, match="other weights than the policy"):
        trainer.train()
    assert steps_done(trainer) == 0


def test_a_second_training_begins_with_the_weights_of_the_first(build, vllm, tiny_llama_path):
    """Both begin at step 0, and TRL tells by the number of the step whether the engine has the weights."""
    trainer = build(tiny_llama_path, **VLLM, learning_rate=1e-3, max_steps=1)
    for _ in range(2):
        trainer.train()
        assert trainer.state.log_history[0]["support/logprob_gap_max"] <= 1e-4


def test_another_temperature_is_named_with_its_value(build, vllm, tiny_llama_path):
    trainer = build(tiny_llama_path, **VLLM)
    trainer.vllm_generation.temperature = 0.7
    with pytest.raises(
        ReplayGapError, match=r"another temperature: at temperature=0\.[67]\d* .*scores at temperature=1\."
    ):
        trainer.train()
    assert steps_done(trainer) == 0


def test_rows_shifted_by_one_are_called_shifted(build, vllm, tiny_llama_path, monkeypatch):
    trainer = build(tiny_llama_path, **VLLM)
    read = Capture.read

    def shifted(*args, **kwargs):
        logprobs, rows, repaired = read(*args, **kwargs)
        return logprobs, rows[np.roll(np.arange(len(rows)), 1)], repaired

    monkeypatch.setattr(Capture, "read", shifted)
    with pytest.raises(SupportError, match="rows are shifted by one"):
        trainer.train()
    assert steps_done(trainer) == 0


def test_a_row_without_its_sampled_token_is_named(build, vllm, tiny_llama_path, monkeypatch):
    trainer = build(tiny_llama_path, **VLLM)
    read = Capture.read

    def without_sampled(*args, **kwargs):
        logprobs, rows, repaired = read(*args, **kwargs)
        lists = rows.to_lists()
        lists[2] = [token + 1 for token in lists[2]]
        return logprobs, SupportRows.from_ragged(lists), repaired

    monkeypatch.setattr(Capture, "read", without_sampled)
    with pytest.raises(SupportError, match="support of token 2 .* does not hold the sampled id"):
        trainer.train()
    assert steps_done(trainer) == 0


@pytest.mark.parametrize(
    ("capture", "name", "says"),
    [
        ("logprobs", "logprobs", "the engine returned no log-probs"),
        ("worker", "logprobs", "0 log-prob positions"),
        ("worker", "sampling_mask", "the engine returned no sampling mask"),
    ],
)
def test_an_engine_that_reports_nothing_is_named(
    build, vllm, tiny_llama_path, monkeypatch, shared_llm, capture, name, says
):
    trainer = build(tiny_llama_path, **VLLM, support_capture=capture)
    generate = shared_llm.generate

    def without(*args, **kwargs):
        outputs = generate(*args, **kwargs)
        setattr(outputs[1].outputs[0], name, None)
        return outputs

    monkeypatch.setattr(shared_llm, "generate", without)
    with pytest.raises(SupportCaptureError, match=f"vLLM request .*: {says}"):
        trainer.train()
    assert steps_done(trainer) == 0


def shift_logprobs(monkeypatch):
    def shifted(*args, **kwargs):
        collected = collect_samples(*args, **kwargs)
        collected.logprobs = [[x[0], *x[:-1]] for x in collected.logprobs]
        return collected

    monkeypatch.setattr(trainer_module, "collect_samples", shifted)


def test_recorded_logprobs_shifted_by_one_are_called_shifted(build, tiny_model_path, monkeypatch):
    trainer = build(tiny_model_path, **HF)
    shift_logprobs(monkeypatch)
    with pytest.raises(ReplayGapError, match="log-probs are shifted by one"):
        trainer.train()


def test_a_gap_can_be_a_warning(build, tiny_model_path, monkeypatch, caplog):
    trainer = build(tiny_model_path, **HF, replay_check="warn")
    shift_logprobs(monkeypatch)
    trainer.train()
    assert "shifted by one" in caplog.text and steps_done(trainer) == 2


def test_lost_supports_stop_a_run_in_half_precision_and_rounding_does_not(build, tiny_model_path, monkeypatch):
    settings = HF | {"bf16": True, "per_device_train_batch_size": 32, "max_completion_length": 24}
    trainer = build(tiny_model_path, **settings)
    trainer.train()
    assert steps_done(trainer) == 2
    log = trainer.state.log_history[0]
    assert log["support/logprob_gap_mean"] > 1e-3 and abs(log["support/check_mass"]) < 0.005

    def lost(*args, **kwargs):
        collected = collect_samples(*args, **kwargs)
        collected.samples = [
            replace(s, supports=SupportRows.from_ragged([range(99)] * len(s.supports))) for s in collected.samples
        ]
        return collected

    monkeypatch.setattr(trainer_module, "collect_samples", lost)
    trainer = build(tiny_model_path, **settings, replay_tolerance=0.3)  # no matter of the mean gap
    with pytest.raises(ReplayGapError, match="At step 0: The policy's scores hold 0.* over more ids than the engine"):
        trainer.train()


def test_several_unsupported_tokens_are_refused(build, tiny_model_path, monkeypatch):
    trainer = build(tiny_model_path, **HF)

    def untraced(recorder, prompts, ids, mask, logprobs, *given, **kwargs):
        logprobs = [[float(x[0]), float(x[1]), *x[2:]] for x in logprobs]
        return collect_samples(recorder, prompts, ids, mask, logprobs, *given, **kwargs)

    monkeypatch.setattr(trainer_module, "collect_samples", untraced)
    with pytest.raises(SupportError, match="2 of 12 loss-bearing tokens have no recorded support"):
        trainer.train()


def test_an_engine_without_the_mask_is_refused(build, tiny_llama_path, vllm):
    with pytest.raises(ValueError, match="support_capture='native' is not available: .* V1.* Set .*='worker'"):
        build(tiny_llama_path, **VLLM, support_capture="native")


def test_a_hook_of_the_users_own_leaves_supports_to_logprobs(build, tiny_llama_path, vllm):
    """vLLM takes one extension of its worker."""
    own = {"vllm_engine_kwargs": {"worker_extension_cls": "a.B"}}
    assert build(tiny_llama_path, **VLLM, **own).vllm_generation.capture == "logprobs"
    with pytest.raises(ValueError, match="support_capture='worker' is not available: .*worker_extension_cls'.='a.B'"):
        build(tiny_llama_path, **VLLM, **own, support_capture="worker")
    with pytest.raises(UnreplayableSettingError, match="top_p=0.9 cannot be replayed: .*='a.B' has its place"):
        build(tiny_llama_path, **VLLM | {"top_k": 0}, **own)


def test_an_older_engine_reads_logprobs_and_says_why(build, tiny_llama_path, vllm, monkeypatch, caplog):
    monkeypatch.setattr(vllm_captures, "mask_channel_obstacle", lambda: "vLLM 0.27 has no channel")
    with caplog.at_level("INFO", logger=vllm_captures.__name__):
        assert build(tiny_llama_path, **VLLM).vllm_generation.capture == "logprobs"
    assert "from vLLM's processed log-probs (vLLM 0.27 has no channel)" in caplog.text
    with pytest.raises(UnreplayableSettingError, match="top_p=0.9 .*vLLM 0.27 has no channel.* Set top_k as well"):
        build(tiny_llama_path, **VLLM | {"top_k": 0})


def test_a_half_precision_engine_on_a_cpu_is_refused(build, tiny_llama_path, vllm):
    with pytest.raises(ValueError, match="vllm_dtype='bfloat16' is not supported on a CPU"):
        build(tiny_llama_path, **VLLM, vllm_dtype="bfloat16")


def test_nothing_is_left_behind_in_trl(build, tiny_model_path, tiny_llama_path, vllm):
    import trl.generation.vllm_generation as trl_vllm
    import trl.trainer.grpo_trainer as trl_grpo

    before = (trl_grpo.VLLMGeneration, trl_grpo.add_fused_lm_head, trl_vllm.LLM, trl_vllm.extract_logprobs)
    build(tiny_model_path, **HF).train()
    with pytest.raises(ValueError):
        build(tiny_llama_path, **VLLM, vllm_dtype="bfloat16")
    assert before == (trl_grpo.VLLMGeneration, trl_grpo.add_fused_lm_head, trl_vllm.LLM, trl_vllm.extract_logprobs)
