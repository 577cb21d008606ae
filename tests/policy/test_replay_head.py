"""The forward that scores supports: it has the signature of the model's own, and virtual tokens are refused."""

import inspect

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.parts import require
from trl_support_replay import UnreplayableSettingError
from trl_support_replay.batch.layout import BatchLayout
from trl_support_replay.policy.replay_head import ReplayBatch, add_replay_head
from trl_support_replay.traces.columns import Trace
from trl_support_replay.traces.support import SupportRows

require("peft")
from peft import (  # noqa: E402
    CPTConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)

TASK = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
VIRTUAL = [
    PromptTuningConfig(**TASK),
    PromptEncoderConfig(**TASK),
    PrefixTuningConfig(**TASK),
    CPTConfig(task_type="CAUSAL_LM", cpt_token_ids=[5, 6], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 2]),
]


@pytest.fixture
def model(tiny_model_path):
    return AutoModelForCausalLM.from_pretrained(tiny_model_path)


@pytest.fixture
def batch():
    ids = np.arange(3, 12, dtype=np.int32)
    rows = SupportRows.from_ragged([[int(i), 20, 21] for i in ids[5:]])
    trace = Trace(ids[:5], ids[5:], np.ones(4, bool), np.full(4, -1, np.float32), rows)
    layout = BatchLayout.build([trace], (1, 9), 4, torch.device("cpu"))
    batch = ReplayBatch(layout, temperature=1.0, log_probs="logprobs")
    return torch.from_numpy(ids.astype(np.int64))[None], batch


def test_the_signature_is_that_of_the_model_and_replay(model):
    own = inspect.signature(model.forward)
    for _ in range(2):  # a second head changes nothing
        add_replay_head(model)
        signature = inspect.signature(model.forward)
        assert [name for name in signature.parameters if name != "replay"] == list(own.parameters)
        assert signature.parameters["replay"].kind is inspect.Parameter.KEYWORD_ONLY
        for name, parameter in own.parameters.items():
            assert signature.parameters[name] == parameter


def test_input_ids_may_come_by_position(model, batch):
    ids, replay = batch
    add_replay_head(model)
    mask = torch.ones_like(ids)
    mask[:, :2] = 0
    with torch.no_grad():
        by_name = model(input_ids=ids, attention_mask=mask, replay=replay).log_probs
        by_position = model(ids, mask, replay=replay).log_probs
        unmasked = model(ids, replay=replay).log_probs
    assert torch.equal(by_position, by_name) and not torch.equal(unmasked, by_name)
    assert (by_name[:, 4:] < 0).all()


@pytest.mark.parametrize("config", VIRTUAL, ids=lambda config: type(config).__name__)
def test_virtual_tokens_are_refused_before_training(build, tiny_model_path, config):
    message = rf"peft_config='{type(config).__name__}' .*virtual tokens \(prompt tuning, prefix tuning\).*Use LoRA"
    with pytest.raises(UnreplayableSettingError, match=message):
        build(tiny_model_path, top_p=0.9, peft_config=config)
    build(tiny_model_path, peft_config=config)  # stock GRPO, with nothing truncated


def test_prompt_tuning_without_replay_trains_as_in_stock(build, tiny_model_path):
    trainer = build(tiny_model_path, peft_config=VIRTUAL[0])
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("config", VIRTUAL[:2], ids=lambda config: type(config).__name__)
def test_virtual_tokens_are_refused_by_the_head(model, batch, config):
    ids, replay = batch
    add_replay_head(model)
    model = get_peft_model(model, config)
    with torch.no_grad():
        assert model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.shape[1] == 13
        with pytest.raises(ValueError, match=r"without input_ids\. Adapters that add virtual tokens"):
            model(input_ids=ids, attention_mask=torch.ones_like(ids), replay=replay)


def test_lora_scores_through_the_signature(model, batch):
    ids, replay = batch
    add_replay_head(model)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    with torch.no_grad():
        assert (model(ids, torch.ones_like(ids), replay=replay).log_probs[:, 4:] < 0).all()
