"""What a long run does besides steps: evaluate, log completions, stop and resume; and what a custom rollout returns."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from trl_support_replay import SupportReplayGRPOConfig, SupportReplayGRPOTrainer, UnreplayableSettingError
from trl_support_replay.traces.support import SupportError

from .conftest import checksum_reward, sums

HF = {"use_vllm": False, "top_p": 0.9}


def test_evaluation_is_stock_and_records_nothing(build, tiny_model_path):
    trainer = build(
        tiny_model_path,
        **HF,
        eval_dataset=sums(4),
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
    )
    trainer.train()
    logs = trainer.state.log_history
    evaluations = [log for log in logs if "eval_reward" in log]
    assert len(evaluations) == 2
    assert not any(key.startswith(("eval_support", "eval_sampling/outside")) for log in evaluations for key in log)
    assert sum("support/logprob_gap_max" in log for log in logs) == 2


def test_greedy_evaluation_works(build, tiny_model_path):
    trainer = build(tiny_model_path, **HF, eval_dataset=sums(4), per_device_eval_batch_size=4)
    trainer.generation_config.do_sample = False
    assert "eval_reward" in trainer.evaluate()


def test_completions_are_logged(build, tiny_model_path, tmp_path):
    build(tiny_model_path, **HF, log_completions=True).train()
    table = pd.read_parquet(tmp_path / "run" / "completions" / "completions_00002.parquet")
    assert len(table) == 4 and {"prompt", "completion", "advantage"} <= set(table)


def test_resuming_continues_the_run(build, tiny_model_path, tmp_path):
    settings = HF | {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "num_iterations": 2}
    whole = build(tiny_model_path, **settings, output_dir=str(tmp_path / "whole"))
    whole.train()
    part = build(tiny_model_path, **settings, output_dir=str(tmp_path / "part"))
    part.args.max_steps = 2
    part.train()
    resumed = build(tiny_model_path, **settings, output_dir=str(tmp_path / "part"))
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    steps = [log["step"] for log in resumed.state.log_history if "support/logprob_gap_max" in log]
    assert steps == [1, 3]
    state = json.loads((tmp_path / "part" / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["log_history"][0]["support/size_mean"] > 1


@pytest.mark.parametrize("replays", [True, False], ids=["replay", "stock TRL"])
def test_a_run_is_repeated_only_when_it_resumes_where_completions_are_sampled(
    build, tiny_model_path, tmp_path, replays
):
    """Each batch of completions serves two steps. A checkpoint does not hold the one that is in use."""
    classes = {} if replays else {"trainer_cls": GRPOTrainer, "config_cls": GRPOConfig}
    sampling = HF if replays else {"use_vllm": False}
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "num_iterations": 2}

    def run(output, checkpoint=None):
        trainer = build(tiny_model_path, **classes, **sampling, **settings, output_dir=str(tmp_path / output))
        sampled, generate = [], trainer._generate_and_score_completions

        def spy(inputs):
            sampled.append((trainer.state.global_step, inputs[0]["prompt"][0]["content"]))
            return generate(inputs)

        trainer._generate_and_score_completions = spy
        trainer.train(resume_from_checkpoint=checkpoint)
        return sampled, torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    ((_, first), (_, second)), weights = run("whole")
    repeated, same = run("repeated", str(tmp_path / "whole" / "checkpoint-2"))
    assert repeated == [(2, second)] and torch.equal(same, weights)
    other, different = run("other", str(tmp_path / "whole" / "checkpoint-1"))
    assert other == [(1, first), (3, second)] and not torch.equal(different, weights)


def test_arguments_may_stand_by_position_as_in_trl(tiny_model_path, tmp_path):
    config = SupportReplayGRPOConfig(str(tmp_path), top_p=0.9, use_cpu=True, bf16=False, report_to=[])
    trainer = SupportReplayGRPOTrainer(tiny_model_path, checksum_reward, config, sums(8), sums(4))
    assert len(trainer.train_dataset) == 8 and len(trainer.eval_dataset) == 4


def test_stock_arguments_are_refused(tiny_model_path, tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(TypeError, match="args is a GRPOConfig.*SupportReplayGRPOConfig"):
        SupportReplayGRPOTrainer(tiny_model_path, lambda **_: [], args, train_dataset=sums())


def test_the_models_own_generation_config_is_checked_before_it_is_loaded(build, tiny_model_path, tmp_path):
    from transformers import GenerationConfig

    # A folder with nothing but a generation config: loading the model would fail with another error.
    folder = tmp_path / "no-weights"
    GenerationConfig(encoder_repetition_penalty=1.5).save_pretrained(folder)
    with pytest.raises(UnreplayableSettingError, match="generation_config.encoder_repetition_penalty=1.5"):
        build(str(folder), **HF)


@pytest.mark.parametrize("synthetic_eos", ["full_vocab", "mask", "error"])
def test_one_end_of_sequence_that_nobody_sampled(build, tiny_model_path, monkeypatch, synthetic_eos):
    trainer = build(tiny_model_path, **HF, synthetic_eos=synthetic_eos)
    generate = GRPOTrainer._generate

    def append_eos(self, prompts):
        prompt_ids, ids, mask, completions, logprobs, *rest = generate(self, prompts)
        ids = [[*x, 2] for x in ids]
        logprobs = [[*x, 0.0] for x in logprobs]
        return prompt_ids, ids, mask, completions, logprobs, *rest

    monkeypatch.setattr(GRPOTrainer, "_generate", append_eos)
    if synthetic_eos == "error":
        with pytest.raises(SupportError, match="synthetic_eos='error' refuses it"):
            trainer.train()
        return
    seen = []
    compute = trainer._compute_loss

    def spy(model, inputs):
        loss = compute(model, inputs)
        seen.append(inputs)
        return loss

    scored = []
    score = trainer._get_per_token_logps_and_entropies

    def spy_scores(*args, **kwargs):
        out = score(*args, **kwargs)
        scored.append(out[0].detach())
        return out

    monkeypatch.setattr(trainer, "_compute_loss", spy)
    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", spy_scores)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["support/synthetic_eos"] == 4 and log["support/logprob_gap_max"] <= 1e-4
    lasts = [len(s.completion_ids) - 1 for s in seen[0]["support_samples"]]
    eos = torch.stack([scored[0][b, t] for b, t in enumerate(lasts)])
    if synthetic_eos == "mask":
        assert all(seen[0]["tool_mask"][b, t] == 0 for b, t in enumerate(lasts))
        assert (eos == 0).all()
    else:  # its ordinary log-prob over the whole vocabulary
        inputs = seen[0]
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        keep = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        fresh = type(trainer.model).from_pretrained(tiny_model_path)
        logp = fresh(input_ids=ids, attention_mask=keep).logits.log_softmax(-1)
        start = inputs["prompt_ids"].shape[1]
        want = torch.stack([logp[b, start + t - 1, 2] for b, t in enumerate(lasts)])
        torch.testing.assert_close(eos, want.detach(), atol=1e-5, rtol=1e-5)


def test_supports_stay_with_their_samples_through_shuffling_and_splitting(build, tiny_model_path):
    trainer = build(
        tiny_model_path, **HF, per_device_train_batch_size=4, steps_per_generation=4, num_iterations=2, max_steps=8
    )
    original = trainer._compute_loss
    batches = []

    def check(model, inputs):
        for b, sample in enumerate(inputs["support_samples"]):
            length = int(inputs["completion_mask"][b].sum())
            np.testing.assert_array_equal(sample.completion_ids, inputs["completion_ids"][b, :length].numpy())
            assert sample.supports.contains(sample.completion_ids).all()
        batches.append(len(inputs["support_samples"]))
        return original(model, inputs)

    trainer._compute_loss = check
    trainer.train()
    assert batches == [4] * 8
