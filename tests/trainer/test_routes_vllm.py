"""Routes and supports of a tiny mixture of experts, both recorded by the real vLLM and replayed by the trainer."""

import pytest

from tests.routing.moe_models import qwen3_moe_config, save_model

from .conftest import character_tokenizer
from .test_replay import assert_replayed

VLLM = {"use_vllm": True, "top_k": 20, "top_p": 0.9, "max_completion_length": 12, "routed_experts_replay": True}


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory):
    """A tiny Qwen3-MoE with a dense layer, and more vocabulary rows than the tokenizer has words."""
    path = tmp_path_factory.mktemp("moe")
    save_model(qwen3_moe_config(), path)
    character_tokenizer().save_pretrained(path)
    return path


def test_ten_steps_with_routes_and_supports_replayed(build, moe_path):
    trainer = build(str(moe_path), **VLLM, max_steps=10, learning_rate=1e-3, vllm_max_model_length=256)
    trainer.train()
    assert_replayed(trainer, 10)
    logs = [log for log in trainer.state.log_history if "routes/agreement" in log]
    assert len(logs) == 10
    for log in logs:
        assert log["routes/agreement"] > 0.99  # rounding may tip a router now and then; replay does not mind
