from __future__ import annotations

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.tiny_models import character_tokenizer
from trl_support_replay.client.pool import ServerPool
from trl_support_replay.client.transport import Retry

from ..trainers.conftest import build  # noqa: F401
from .fakes import FakeEngine, HTTPServer, serving
from .vllm_process import VLLMServe

QUICK = Retry(give_up_after=5.0, first_delay=0.01, max_delay=0.05)


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def weights_dir(tmp_path, monkeypatch):
    folder = tmp_path / "weights"
    folder.mkdir()
    monkeypatch.setenv("TRL_SUPPORT_REPLAY_WEIGHTS_DIR", str(folder))
    return folder


@pytest.fixture
def server(engine):
    with serving(HTTPServer(engine)) as running:
        yield running


@pytest.fixture
def pool_of():
    """`pool_of(url, ...)` gives a pool that is closed after the test."""
    pools = []

    def make(*urls, retry=QUICK, **kwargs):
        pools.append(ServerPool(urls, retry=retry, **kwargs))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(scope="session")
def tiny_moe_path(tmp_path_factory):
    """A Qwen3-MoE of 3 layers, the middle one dense, that speaks in characters and is fairly sure of what it says."""
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_hidden_layers=3,
            mlp_only_layers=[1],
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            max_position_embeddings=2048,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(12)
    path = tmp_path_factory.mktemp("models") / "tiny-moe"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def moe_server(tiny_moe_path, tmp_path_factory):
    """One real server for the whole session, started by `vllm-serve`."""
    with VLLMServe(
        tiny_moe_path,
        weights_dir=tmp_path_factory.mktemp("weights"),
        flags=["--enable-return-routed-experts", "--max-model-len", "1024"],
        api_key="session-secret",
        names=["tiny"],
    ) as running:
        yield running
