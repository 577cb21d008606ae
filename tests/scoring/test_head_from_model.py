"""The head of transformers models: every family's own scale and softcap, PEFT, casts, and heads that are refused."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.parts import require
from trl_support_replay.scoring import SupportCSR, lm_head_from_model, score_support
from trl_support_replay.scoring.arguments import OUTPUTS

from .oracle import scores_from_logits

VOCAB = 48
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# One for each way from projection to logit, and each place where a family keeps it.
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25},
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "vaultgemma": {"final_logit_softcapping": 2.0},
    "nanochat": {"final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 3.0},
    "granitemoe": {"logits_scaling": 3.0, "num_local_experts": 2, "num_experts_per_tok": 1},
    "hyperclovax": {"logits_scaling": 3.0},
    "falcon_h1": {"lm_head_multiplier": 0.3, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
    "recurrent_gemma": {
        "num_hidden_layers": 2,
        "logits_soft_cap": 2.0,
        "lru_width": 16,
        "block_types": ("recurrent", "attention"),
    },
    "minicpm3": {"num_key_value_heads": 2},
    "phi": {},
    "gpt_neox": {},
    "gpt2": {},
    "gptj": {"rotary_dim": 4},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 12},
}


def build(family: str, **settings) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **(SIZES | FAMILIES.get(family, {}) | settings))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.get_output_embeddings().parameters():
            parameter.copy_(torch.randn_like(parameter) * (20 if family == "opt" else 1))
    return model


def sample(num_tokens: int = 10, vocab: int = VOCAB):
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randperm(vocab, generator=generator)[: i % 7 + 1].tolist() for i in range(num_tokens)]
    return [row[-1] for row in rows], rows


def hidden_and_logits(model, input_ids):
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base.base_model(input_ids).last_hidden_state[0], model(input_ids).logits[0]


def check(model, outputs=OUTPUTS, atol=2e-5, base=None):
    """Scores by the head equal scores by the model's own logits."""
    sampled, rows = sample()
    input_ids = torch.randint(3, VOCAB, (1, len(rows)), generator=torch.Generator().manual_seed(4))
    hidden, logits = hidden_and_logits(model, input_ids)
    head = lm_head_from_model(base if base is not None else model)
    scores = score_support(hidden, head, torch.tensor(sampled), SupportCSR.from_lists(rows), outputs=outputs)
    expected = scores_from_logits(logits, sampled, rows)
    assert expected["full_entropy"].mean() < 3.5  # far from uniform: a wrong scale would show
    for name in outputs:
        torch.testing.assert_close(getattr(scores, name).double(), expected[name], rtol=1e-5, atol=atol)
    return scores, expected


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_those_of_the_familys_own_logits(family):
    check(build(family))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_tied_heads(family):
    model = build(family, tie_word_embeddings=True)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    scores, expected = check(model)
    weight = model.get_output_embeddings().weight
    got, want = (torch.autograd.grad(x.sum(), weight)[0] for x in (scores.logprobs, expected["logprobs"]))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def adapted(model, config="LoraConfig", **settings):
    require("peft")
    import peft

    return peft.get_peft_model(model, getattr(peft, config)(**settings))


def peft_model(target, **settings):
    model = adapted(build("llama"), r=3, target_modules=target, **settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("disabled", [False, True])
def test_lora_on_the_head(disabled, rslora):
    model = peft_model(["q_proj", "lm_head"], lora_alpha=5, use_rslora=rslora).eval()
    if disabled:
        with model.disable_adapter():
            check(model, base=model.get_base_model())
    else:
        scores, expected = check(model, base=model.get_base_model())
        for name, parameter in model.named_parameters():
            if "lm_head" in name and "lora" in name:
                got, want = (
                    torch.autograd.grad(x.sum(), parameter, retain_graph=True)[0]
                    for x in (scores.full_entropy, expected["full_entropy"])
                )
                assert want.abs().max() > 0
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_merged_lora_counts_once():
    model = peft_model(["lm_head"]).eval()
    model.merge_adapter()
    check(model, base=model.get_base_model())


def test_lora_dropout_is_that_of_the_layer():
    model = peft_model(["lm_head"], lora_dropout=0.5).train()
    sampled, rows = sample()
    hidden = torch.randn(len(rows), 16)
    head = lm_head_from_model(model.get_base_model())
    torch.manual_seed(7)
    scores = score_support(hidden, head, torch.tensor(sampled), SupportCSR.from_lists(rows))
    torch.manual_seed(7)
    expected = scores_from_logits(model.get_base_model().lm_head(hidden), sampled, rows)
    torch.testing.assert_close(scores.logprobs.double(), expected["logprobs"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("disabled", [False, True])
def test_modules_to_save_of_the_head(disabled):
    model = peft_model(["q_proj"], modules_to_save=["lm_head"]).eval()
    if disabled:
        with model.disable_adapter():
            check(model, base=model.get_base_model())
    else:
        scores, _ = check(model, base=model.get_base_model())
        copy = model.get_base_model().lm_head.modules_to_save["default"].weight
        original = model.get_base_model().lm_head.original_module.weight
        assert torch.autograd.grad(scores.logprobs.sum(), copy)[0].abs().max() > 0
        assert not original.requires_grad


def test_a_head_cast_to_float32_below_a_half_precision_backbone():
    """As TRL's cast_lm_head_to_fp32: the layer's forward is replaced, and comes back."""
    model = build("llama").bfloat16()
    model.lm_head = model.lm_head.float()
    head = model.lm_head

    def cast(hidden):
        return nn.functional.linear(hidden.float(), head.weight)

    head.forward = cast
    check(model)
    assert head.forward is cast


def test_the_modules_own_forward_comes_back_even_after_an_error():
    model = build("llama")
    head = lm_head_from_model(model)
    with pytest.raises(ValueError, match="not among"):
        score_support(torch.randn(1, 16), head, torch.tensor([3]), SupportCSR.from_lists([[4, 5]]))
    assert "forward" not in vars(model.lm_head)
    assert model.lm_head(torch.randn(1, 16)).shape == (1, VOCAB)


def test_hooks_of_the_head_see_one_call():
    model = build("llama")
    calls = []
    model.lm_head.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape))
    sampled, rows = sample()
    score_support(
        torch.randn(len(rows), 16), lm_head_from_model(model), torch.tensor(sampled), SupportCSR.from_lists(rows)
    )
    assert calls == [(10, 16)]


class _Rank2Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(VOCAB, 16))

    def forward(self, x):
        return torch.tanh(x @ self.weight.T)


class _Model(LlamaForCausalLM):
    def __init__(self, head):
        super().__init__(LlamaConfig(**SIZES))
        self.head = head

    def get_output_embeddings(self):
        return self.head


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (None, "_Model has no output head"),
        (nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 4)]), "_Model has 2 output heads"),
        (_Rank2Head(), "output head is a _Rank2Head"),
    ],
)
def test_heads_that_are_not_one_projection_are_refused(head, message):
    with pytest.raises(ValueError, match=message):
        lm_head_from_model(_Model(head))


def test_a_projection_inside_a_larger_head_is_refused():
    config = transformers.BertConfig(**SIZES, is_decoder=True)
    with pytest.raises(ValueError, match="cls.predictions.decoder, a part of a larger head"):
        lm_head_from_model(transformers.BertLMHeadModel(config))


@pytest.mark.parametrize(
    ("settings", "message"), [({"use_dora": True}, "DoraLinearVariant"), ({"lora_bias": True}, "lora_bias=True")]
)
def test_variants_of_lora_on_the_head_are_refused(settings, message):
    base = build("llama")
    base.lm_head = nn.Linear(16, VOCAB, bias=True)
    model = adapted(base, r=2, target_modules=["lm_head"], **settings)
    with pytest.raises(ValueError, match=message):
        lm_head_from_model(model.get_base_model())


def test_adalora_on_the_head_is_refused():
    model = adapted(build("llama"), "AdaLoraConfig", init_r=2, total_step=10, target_modules=["lm_head"])
    with pytest.raises(ValueError, match="'default' on the output head belongs to a SVDLinear"):
        lm_head_from_model(model.get_base_model())


def test_two_active_adapters_on_the_head_are_refused():
    model = peft_model(["lm_head"])
    model.add_adapter("second", model.peft_config["default"])
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match="default, second are active together"):
        lm_head_from_model(model.get_base_model())


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(VOCAB, 16, dtype=torch.int8), "quantised"),
        (torch.zeros(VOCAB, 16, device="meta"), "meta device"),
        (torch.zeros(0), "sharded and was not gathered"),
    ],
)
def test_weights_that_cannot_be_read_are_refused(weight, message):
    model = build("llama")
    model.lm_head.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(ValueError, match=message):
        score_support(torch.randn(1, 16), lm_head_from_model(model), torch.tensor([4]), SupportCSR.from_lists([[4, 5]]))
