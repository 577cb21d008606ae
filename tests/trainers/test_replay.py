"""The proof: replayed log-probs equal the recorded ones and the importance ratio is 1, on real models and engines."""

import pytest

from trl_support_replay.engine_outputs.errors import SupportCaptureError
from trl_support_replay.libraries.rebind import rebound
from trl_support_replay.settings.contract import UnreplayableSettingError

from .conftest import lend

HF = {"use_vllm": False, "max_completion_length": 16}
VLLM = {"use_vllm": True, "max_completion_length": 16, "top_k": 20, "top_p": 0.9, "learning_rate": 1e-5}
BATCHING = {"use_transformers_continuous_batching": True}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}


def assert_replayed(trainer, generations):
    """The three figures, at every generation."""
    logs = [log for log in trainer.state.log_history if "support/logprob_gap_max" in log]
    assert len(logs) == generations
    for log in logs:
        assert log["support/logprob_gap_max"] <= 1e-4
        assert abs(log["sampling/importance_sampling_ratio_raw/mean"] - 1) <= 1e-3
        assert log["sampling/outside_10pct"] == 0
        assert log["support/repaired"] == 0 and log["support/synthetic_eos"] == 0
        assert log["support/size_mean"] > 1.5  # there was something to replay
    return logs


@pytest.mark.parametrize(
    ("settings", "generations"),
    [
        pytest.param({"top_p": 0.9}, 2, id="top_p"),
        pytest.param({"top_p": 1.0, "min_p": 0.1}, 2, id="min_p alone"),
        pytest.param({"top_k": 20, "top_p": 0.9, "temperature": 0.6}, 2, id="temperature 0.6"),
        pytest.param({"top_k": 8, "num_iterations": 2, "max_steps": 4}, 2, id="two optimizer steps a generation"),
        pytest.param({"top_k": 8, "steps_per_generation": 2, "max_steps": 4}, 2, id="steps_per_generation"),
        pytest.param({"top_k": 8, "gradient_accumulation_steps": 2}, 2, id="gradient accumulation"),
        pytest.param({"top_k": 8, "gradient_checkpointing": False}, 2, id="no gradient checkpointing"),
        pytest.param({"top_k": 8, "lora": LORA}, 2, id="LoRA"),
        pytest.param({"top_k": 8, "lora": LORA, "beta": 0.1}, 2, id="LoRA with adapter reference"),
        pytest.param({"top_k": 8, "beta": 0.1, "kl_scope": "full"}, 2, id="full KL"),
        pytest.param({"generation_kwargs": {"typical_p": 0.8}}, 2, id="typical_p"),
        pytest.param({"top_p": 0.9, **BATCHING}, 2, id="continuous batching"),
        pytest.param({"top_k": 8, **BATCHING, "lora": LORA}, 2, id="continuous batching with LoRA"),
        pytest.param({"top_k": 8, "cast_lm_head_to_fp32": True}, 2, id="head in float32"),
    ],
)
def test_transformers_generation_is_replayed_exactly(build, tiny_model_path, settings, generations):
    trainer = build(tiny_model_path, **HF, **settings)
    trainer.train()
    assert_replayed(trainer, generations)


def test_masked_truncated_completions_leave_loss_and_check(build, tiny_model_path):
    settings = {"top_p": 0.9, "mask_truncated_completions": True, "per_device_train_batch_size": 16}
    trainer = build(tiny_model_path, **HF | settings | {"max_completion_length": 40})
    trainer.train()
    for log in assert_replayed(trainer, 2):
        assert 0 < log["completions/clipped_ratio"] < 1


def test_a_batch_of_truncated_completions_only_has_no_figures(build, tiny_model_path):
    trainer = build(tiny_model_path, **HF | {"max_completion_length": 1}, top_p=0.9, mask_truncated_completions=True)
    trainer.train()
    assert trainer.state.global_step == 2
    assert "support/logprob_gap_max" not in trainer.state.log_history[0]


@pytest.mark.parametrize(
    ("settings", "generations"),
    [
        pytest.param({}, 2, id="top_k and top_p"),
        pytest.param({"support_capture": "logprobs"}, 2, id="log-probs"),
        pytest.param({"top_k": 0, "top_p": 0.95}, 2, id="top_p alone"),
        pytest.param({"top_k": 0, "top_p": 1.0, "min_p": 0.02}, 2, id="min_p alone"),
        pytest.param({"temperature": 0.6}, 2, id="temperature 0.6"),
        pytest.param({"num_iterations": 2, "max_steps": 4}, 2, id="two optimizer steps a generation"),
        pytest.param({"lora": LORA, "beta": 0.05}, 2, id="LoRA with adapter reference"),
        pytest.param({"gradient_checkpointing": False}, 2, id="no gradient checkpointing"),
        pytest.param({"min_p": 0.05, "generation_kwargs": {"min_tokens": 4}}, 2, id="min_p and min_tokens"),
        pytest.param({"generation_kwargs": {"stop": ["e", "a"]}}, 2, id="stop strings"),
        pytest.param({"vllm_structured_outputs_regex": "[A-Za-z ,.]+"}, 2, id="a regex"),
    ],
)
def test_vllm_generation_is_replayed_exactly(build, vllm, tiny_llama_path, settings, generations):
    trainer = build(tiny_llama_path, **VLLM | settings)
    trainer.train()
    logs = assert_replayed(trainer, generations)
    capture = settings.get("support_capture", "worker")
    assert trainer.vllm_generation.capture == capture
    assert vllm.get("max_logprobs") == (24 if capture == "logprobs" else None)
    # TRL's own metric agrees with ours.
    for log in logs:
        assert log["sampling/sampling_logp_difference/max"] == pytest.approx(log["support/logprob_gap_max"], abs=1e-6)


PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2}


@pytest.mark.slow
@pytest.mark.parametrize("penalties", [{}, PENALTIES], ids=["top_p alone", "with penalties"])
def test_four_thousand_tokens_of_top_p_are_replayed_exactly(build, smollm2_llm, smollm2_path, monkeypatch, penalties):
    lend(monkeypatch, smollm2_llm, str(smollm2_path))
    trainer = build(
        str(smollm2_path),
        use_vllm=True,
        top_p=0.95,
        max_completion_length=64,
        per_device_train_batch_size=16,
        max_steps=4,
        learning_rate=1e-5,
        generation_kwargs={"ignore_eos": True, **penalties},
    )
    trainer.train()
    logs = assert_replayed(trainer, 4)
    assert sum(log["support/tokens"] for log in logs) == 4 * 16 * 64
    assert sum(log["support/size_mean"] for log in logs) / 4 > 100  # far more than any number of log-probs


def test_a_request_that_the_engine_gives_up_is_named(build, vllm, tiny_llama_path, shared_llm, monkeypatch):
    """As it does where a constraint takes too long to compile, which depends on the machine."""
    trainer = build(tiny_llama_path, **VLLM)
    generate = shared_llm.generate

    def given_up(*args, **kwargs):
        outputs = generate(*args, **kwargs)
        outputs[1].outputs[0].finish_reason = "error"
        return outputs

    monkeypatch.setattr(shared_llm, "generate", given_up)
    with pytest.raises(SupportCaptureError, match="the engine gave it up .*'error'.* takes too long to compile"):
        trainer.train()


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        ("model_config", "logprobs_mode", "raw_logprobs"),
        ("model_config", "logits_processors", ["some.module:Processor"]),
        ("", "speculative_config", {"method": "ngram"}),
    ],
)
def test_an_engine_that_turns_out_to_break_replay_is_refused(
    build, vllm, tiny_llama_path, shared_llm, place, name, value
):
    """The configuration of the engine that was built counts, not only what was asked for: a model can bring drafts."""
    config = shared_llm.llm_engine.vllm_config
    with rebound(getattr(config, place) if place else config, **{name: value}):
        with pytest.raises(UnreplayableSettingError, match=f"^the engine's {name}="):
            build(tiny_llama_path, **VLLM)


def test_a_real_model_is_replayed_exactly_and_stock_is_far_from_it(build, smollm2_llm, smollm2_path, monkeypatch):
    """What replay is for: the same run on SmolLM2 with it and without."""
    from trl import GRPOConfig, GRPOTrainer

    from trl_support_replay.engines.vllm_engine import stock_engine_fixes

    path = str(smollm2_path)
    lend(monkeypatch, smollm2_llm, path)
    trainer = build(path, **VLLM)
    trainer.train()
    assert_replayed(trainer, 2)
    with stock_engine_fixes(max_logprobs=24):
        trainer = build(path, trainer_cls=GRPOTrainer, config_cls=GRPOConfig, **VLLM, max_steps=1)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["sampling/sampling_logp_difference/mean"] > 0.1
    assert log["sampling/importance_sampling_ratio/mean"] < 0.5
