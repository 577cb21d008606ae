"""The probe of a model: what is scored wrongly is refused by name, everything else passes and is left as it was."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.routing import moe_families
from trl_support_replay.analysis.audit.token_scores import TokenScorer
from trl_support_replay.policy.model_probe import Probe, UnreplayableModelError
from trl_support_replay.policy.noise import silence
from trl_support_replay.policy.replay_head import add_replay_head
from trl_support_replay.trainers.replayed_models import replayed_scores

from ..scoring.test_head_from_model import FAMILIES, SIZES, build, peft_model

# What a tiny model of these needs that a large one has by itself, or what transformers cannot run in training mode.
WRONG = {
    "inkling_text": "The scores of InklingForCausalLM cannot be replayed: .* differ by [0-9.]+ nats",
    "llama4_text": "Llama4ForCausalLM names no backbone",
    "phimoe": "PhimoeForCausalLM draws random numbers in training mode .*PhimoeTopKRouter",
}
CRASHES_IN_TRAINING = {"doge"}  # eager attention drops out a tuple


def check(model):
    add_replay_head(model)
    probe = Probe.run(model)
    silence(model)
    probe.check_training_mode(model)
    probe.check_scores(model, functools.partial(replayed_scores, model))
    return probe


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", sorted({*moe_families.FAMILIES, *moe_families.REFUSED} - CRASHES_IN_TRAINING))
def test_families_of_mixtures_of_experts(family, dtype):
    model = moe_families.build(family, dtype=dtype)
    if family not in WRONG:
        check(model)
        return
    with pytest.raises(UnreplayableModelError, match=WRONG[family]):
        check(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_heads(family, dtype):
    assert check(build(family).to(dtype)).tolerance < 0.2 or family == "minicpm3"  # whose logits reach 360


@pytest.mark.parametrize("target", [["q_proj"], ["q_proj", "lm_head"]])
def test_lora(target):
    model = peft_model(target, lora_dropout=0.2)
    add_replay_head(model.get_base_model())
    probe = Probe.run(model)
    assert silence(model) == {"lora_dropout": 0.2}
    probe.check_training_mode(model)
    probe.check_scores(model, functools.partial(replayed_scores, model))


class Scaled(LlamaForCausalLM):
    """Divides its logits by 1.1, after its head."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits / 1.1
        return output


class Cut(LlamaForCausalLM):
    """Returns no logits for the last rows of its head, which are padding."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits[..., :-8]
        return output


class Masking(LlamaForCausalLM):
    """Takes some ids out of its distribution, as Chameleon does with those of images."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits[..., 3:9] = torch.finfo(output.logits.dtype).min
        return output


class PredictionHead(LlamaForCausalLM):
    """Has a layer between backbone and head."""

    def __init__(self, config):
        super().__init__(config)
        self.transform = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, *args, **kwargs):
        output = self.model(*args, **kwargs)
        return transformers.modeling_outputs.CausalLMOutput(
            logits=self.lm_head(torch.tanh(self.transform(output.last_hidden_state)))
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("model_class", "message"),
    [
        (Scaled, "The scores of Scaled cannot be replayed: .*between its last hidden state and its logits"),
        (Masking, "Masking masks 6 of 48 ids after its head"),
        (PredictionHead, "The scores of PredictionHead cannot be replayed"),
        (Cut, "Cut returns logits for 40 ids, and its output head has 48 rows"),
    ],
)
def test_what_comes_between_states_and_logits_is_refused(model_class, message, dtype):
    torch.manual_seed(0)
    model = model_class(LlamaConfig(**SIZES))
    with torch.no_grad():
        model.lm_head.weight.normal_()
    model = model.to(dtype)
    with pytest.raises(UnreplayableModelError, match=message):
        check(model)
    with pytest.raises(UnreplayableModelError, match=message):
        TokenScorer(model, temperature=0.7)


def test_a_head_in_float32_above_a_half_precision_backbone_is_compared_tightly():
    model = build("llama").bfloat16()
    model.lm_head.float()
    head = model.lm_head
    head.forward = lambda hidden: nn.functional.linear(hidden.float(), head.weight)
    assert check(model).every_token


class Placeholder(LlamaForCausalLM):
    """Wants an image where a placeholder is, as vision-language models do."""

    def forward(self, input_ids=None, **kwargs):
        assert not (input_ids == self.config.image_token_id).any()
        return super().forward(input_ids=input_ids, **kwargs)


@pytest.mark.parametrize("token", range(3, SIZES["vocab_size"]))
def test_the_probe_leaves_special_ids_out(token):
    Probe.run(Placeholder(LlamaConfig(**SIZES, image_token_id=token)))


class Counting(nn.Module):
    """Keeps a count of the tokens that it has seen in training mode, as some routers do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, states, **kwargs):
        if self.training:
            self.count += states.shape[1]
        return states


def test_a_probe_leaves_the_model_as_it_was():
    model = build("opt", layerdrop=0.0)  # draws numbers in training mode, though they decide nothing
    model.model.decoder.layers.append(counting := Counting())
    model.model.decoder.layers[0].eval()
    model.model.decoder.layers[0].fc1.train()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check(model)
    assert torch.equal(torch.rand(3), expected)
    assert [module.training for module in model.modules()] == modes
    assert counting.count == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.get_output_embeddings()._forward_hooks


def test_every_pass_compares_with_the_logits_of_evaluation_mode():
    """A model that is right in evaluation mode, and divides its states by two in training mode."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    model.model.norm.register_forward_hook(lambda module, args, out: out / 2 if module.training else out)
    with pytest.raises(UnreplayableModelError, match="LlamaForCausalLM computes other logits in training mode"):
        check(model)
