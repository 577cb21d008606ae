"""Dropout and other noise of training mode: off while supports are replayed, or refused by name."""

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.parts import require
from tests.tiny_models import character_tokenizer
from trl_support_replay import (
    SupportReplayGRPOConfig,
    SupportReplayRLOOConfig,
    SupportReplayRLOOTrainer,
    UnreplayableSettingError,
)
from trl_support_replay.policy.model_probe import Probe, UnreplayableModelError
from trl_support_replay.policy.noise import noise_settings, silence
from trl_support_replay.trainers.replayed_models import ReplayedModels

from ..trainers.test_replay import assert_replayed

require("peft")
from peft import LoKrConfig, LoraConfig, get_peft_model  # noqa: E402

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPT = {"word_embed_proj_dim": 32, "ffn_dim": 48}
FALCON = {"alibi": False, "new_decoder_architecture": False}


def build_model(family, attention="eager", **settings):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_()
    return model


def answers(model):
    """Logits of a few tokens in training mode, twice, and in evaluation mode."""
    ids = torch.arange(3, 23).view(2, 10)
    with torch.no_grad():
        return [model.train(mode)(input_ids=ids).logits for mode in (True, True, False)]


NOISY = {
    "nothing": ("llama", {}, {}),
    "Llama's attention": ("llama", {"attention_dropout": 0.1}, {"attention_dropout": 0.1}),
    "GPT-2": (
        "gpt2",
        {"resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.3},
        {"drop": 0.2, "attn_dropout": 0.3, "resid_dropout": 0.1, "dropout": 0.1},
    ),
    "OPT": ("opt", OPT | {"dropout": 0.1, "attention_dropout": 0.2}, {"dropout": 0.2}),
    "OPT's layers": ("opt", OPT | {"dropout": 0.0, "layerdrop": 0.3}, {"layerdrop": 0.3}),
    "Mixtral's router": ("mixtral", {"router_jitter_noise": 0.3, "num_local_experts": 4}, {"jitter_noise": 0.3}),
    "DBRX's router": (
        "dbrx",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": 0.3},
        },
        {"moe_jitter_eps": 0.3},
    ),
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", NOISY)
def test_noise_is_off_and_the_configuration_keeps_it(name, attention):
    family, settings, expected = NOISY[name]
    model = build_model(family, attention, **settings)
    saved = model.config.to_dict()
    first, second, evaluated = answers(model)
    assert torch.equal(first, second) == (name == "nothing")
    probe = Probe.run(model)
    if expected:
        with pytest.raises(UnreplayableModelError, match="in training mode"):
            probe.check_training_mode(model)
    assert silence(model) == expected
    probe.check_training_mode(model)
    assert all(torch.equal(logits, evaluated) for logits in answers(model))
    assert model.config.to_dict() == saved
    assert silence(model) == {}


ADAPTERS = {
    "LoRA": (LoraConfig(r=2, lora_dropout=0.2, target_modules=["q_proj", "lm_head"]), {"lora_dropout": 0.2}),
    "LoKr": (
        LoKrConfig(r=2, rank_dropout=0.2, module_dropout=0.3, target_modules=["q_proj"]),
        {"rank_dropout": 0.2, "module_dropout": 0.3},
    ),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_dropout_of_adapters(kind, trained):
    """An adapter that is still 0 shows no noise in any logit, so the probe looks at the random numbers."""
    config, expected = ADAPTERS[kind]
    config.init_lora_weights = config.init_weights = not trained
    model = get_peft_model(build_model("llama"), config)
    probe = Probe.run(model)
    with pytest.raises(UnreplayableModelError, match=f"{next(iter(expected))}=0.2.* set it to 0"):
        probe.check_training_mode(model)
    assert silence(model) == expected
    probe.check_training_mode(model)
    first, second, evaluated = answers(model)
    assert torch.equal(first, evaluated) and torch.equal(second, evaluated)


def test_noise_that_a_model_reads_from_its_configuration_at_each_call_is_refused():
    model = build_model("falcon", hidden_dropout=0.1, attention_dropout=0.0, **FALCON)
    probe = Probe.run(model)
    silence(model)
    with pytest.raises(UnreplayableModelError, match=r"FalconForCausalLM draws random .*FalconDecoderLayer") as error:
        probe.check_training_mode(model)
    assert "has hidden_dropout=0.1. If one of these is the cause, set it to 0" in str(error.value)
    assert noise_settings(model) == {"hidden_dropout": 0.1}


class Noise(nn.Module):
    """Noise without a setting, in a branch that has no effect yet."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, states):
        return states + self.weight * torch.randn_like(states) if self.training else states


def test_noise_without_a_name_or_an_effect_is_refused():
    model = build_model("llama")
    model.model.norm = nn.Sequential(model.model.norm, Noise())
    first, second, evaluated = answers(model)
    assert torch.equal(first, second) and torch.equal(first, evaluated)
    probe = Probe.run(model)
    assert silence(model) == {}
    with pytest.raises(
        UnreplayableModelError, match=r"aten\.randn_like.* in the Noise model\.norm\.1.* names no setting"
    ):
        probe.check_training_mode(model)


def test_statistics_of_a_batch_are_refused():
    """No noise, yet not what is computed in evaluation mode."""
    model = build_model("llama")
    norm = nn.BatchNorm1d(32)
    model.model.norm.register_forward_hook(lambda module, args, out: norm(out.flatten(0, -2)).view_as(out))
    model.add_module("late", norm)
    with pytest.raises(UnreplayableModelError, match="other logits in training mode than in evaluation mode"):
        Probe.run(model).check_training_mode(model)


# ------------------------------------------------------------------------------------------------------- trainers

LORA = LoraConfig(r=4, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)


def sharp_llama(**settings):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **settings))
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model


@pytest.mark.parametrize("rlo", [False, True], ids=["GRPO", "RLOO"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_dropout_is_off_in_every_pass(build, tiny_model_path, caplog, checkpointing, rlo):
    kwargs = {"trainer_cls": SupportReplayRLOOTrainer, "config_cls": SupportReplayRLOOConfig} if rlo else {}
    settings = {"top_p": 0.9, "num_iterations": 2, "max_steps": 3, "beta": 0.1, "gradient_checkpointing": checkpointing}
    with caplog.at_level(logging.WARNING, logger="trl_support_replay"):
        trainer = build(tiny_model_path, peft_config=LORA, **settings, **kwargs)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "support/logprob_gap_max" in log]
    assert len(logs) == 2 and all(log["support/logprob_gap_max"] <= 1e-4 for log in logs)
    if not rlo:
        assert_replayed(trainer, 2)
    (warning,) = [record.getMessage() for record in caplog.records if "off while supports" in record.getMessage()]
    assert "lora_dropout=0.05" in warning
    trainer.save_model()
    saved = json.loads((Path(trainer.args.output_dir) / "adapter_config.json").read_text())
    assert saved["lora_dropout"] == 0.05


@pytest.mark.parametrize("disable_dropout", [False, True])
def test_dropout_of_the_model_is_off_in_every_pass(build, caplog, disable_dropout):
    """TRL's disable_dropout leaves what is no module of its own."""
    with caplog.at_level(logging.WARNING, logger="trl_support_replay"):
        trainer = build(
            sharp_llama(attention_dropout=0.1),
            processing_class=character_tokenizer(),
            top_p=0.9,
            num_iterations=2,
            max_steps=3,
            disable_dropout=disable_dropout,
        )
    trainer.train()
    assert_replayed(trainer, 2)
    assert "attention_dropout=0.1" in caplog.text
    assert trainer.model.config.attention_dropout == 0.1


def test_the_reference_model_is_silenced_too(build, tiny_model_path):
    trainer = build(tiny_model_path, top_p=0.9, beta=0.1, model_init_kwargs={"attention_dropout": 0.1})
    for model in (trainer.model, trainer.ref_model):
        assert model.model.layers[0].self_attn.attention_dropout == 0


def test_models_that_cannot_run_at_construction_are_silenced_before_the_first_generation(
    build, tiny_model_path, monkeypatch
):
    """As for sharded models, which run when training has wrapped them (tests/policy/test_sharded_model_probe.py)."""
    monkeypatch.setattr(ReplayedModels, "_can_run", lambda self: False)
    trainer = build(tiny_model_path, top_p=0.9, num_iterations=2, model_init_kwargs={"attention_dropout": 0.1})
    attention = trainer.model.model.layers[0].self_attn
    assert attention.attention_dropout == 0.1
    trainer.train()
    assert attention.attention_dropout == 0
    assert_replayed(trainer, 1)


def test_a_model_without_noise_is_not_spoken_of(build, tiny_model_path, caplog):
    with caplog.at_level(logging.WARNING, logger="trl_support_replay"):
        build(tiny_model_path, top_p=0.9, peft_config=LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.0))
    assert "off while supports" not in caplog.text


def test_stock_training_keeps_its_dropout(build, tiny_model_path):
    trainer = build(tiny_model_path, model_init_kwargs={"attention_dropout": 0.1})
    assert trainer.model.model.layers[0].self_attn.attention_dropout == 0.1


@pytest.mark.parametrize("replay", [{"top_k": 5}, {"routed_experts_replay": True}])
@pytest.mark.parametrize("config", [SupportReplayGRPOConfig, SupportReplayRLOOConfig])
def test_neftune_is_refused(config, replay):
    settings = {"use_cpu": True, "bf16": False, "neftune_noise_alpha": 5.0}
    with pytest.raises(UnreplayableSettingError, match=r"neftune_noise_alpha=5\.0 cannot be replayed: .*Leave it out"):
        config(**settings, **replay)
    assert config(**settings).neftune_noise_alpha == 5.0


def test_neftune_that_is_set_later_is_refused(build, tiny_model_path):
    with pytest.raises(UnreplayableSettingError, match="neftune_noise_alpha"):
        build(tiny_model_path, config_cls=_set_later, top_p=0.9)


def _set_later(**settings):
    args = SupportReplayGRPOConfig(**settings)
    args.neftune_noise_alpha = 5.0
    return args
