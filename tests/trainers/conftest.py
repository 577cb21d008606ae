"""A tiny character-level model for exact comparisons, and one vLLM engine for the whole session."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.parts import require
from trl_support_replay import SupportReplayGRPOConfig, SupportReplayGRPOTrainer


def character_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    symbols = ["<pad>", "<bos>", "<eos>", "\n", *(chr(c) for c in range(32, 127))]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[], unk_token="?")),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    return tokenizer


def save_tiny_model(path, hidden_size: int = 32) -> str:
    """A Llama with 2 layers, 99 characters and sharp logits, so that truncation cuts something.

    vLLM's attention on a CPU needs heads of 32, and with four of them a hidden size of 128.
    """
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny-chars")


def sums(n: int = 32) -> Dataset:
    prompts = [f"What is {a}+{b}? Explain briefly." for a in range(2, 10) for b in range(3, 7)]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": p}] for p in prompts[:n]]})


def checksum_reward(completions, **_):
    """A reward that differs between almost all completions."""
    return [float(sum(map(ord, completion[0]["content"])) % 13) for completion in completions]


@pytest.fixture
def build(tmp_path):
    """Build a trainer: `build(model, trainer_cls=..., lora=..., **config)`; `lora` goes to a `LoraConfig`."""

    def build(model, trainer_cls=SupportReplayGRPOTrainer, config_cls=SupportReplayGRPOConfig, **kwargs):
        names = (
            "peft_config",
            "eval_dataset",
            "train_dataset",
            "reward_funcs",
            "tools",
            "rollout_func",
            "environment_factory",
            "processing_class",
            "callbacks",
        )
        extra = {name: kwargs.pop(name) for name in names if name in kwargs}
        if lora := kwargs.pop("lora", None):
            require("peft")
            from peft import LoraConfig

            extra["peft_config"] = LoraConfig(**lora)
        settings = {
            "output_dir": str(tmp_path / "run"),
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "disable_tqdm": True,
            "max_steps": 2,
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 12,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "seed": 3,
        } | kwargs
        reward_funcs = extra.pop("reward_funcs", checksum_reward)
        train_dataset = extra.pop("train_dataset", sums())
        return trainer_cls(model, reward_funcs, config_cls(**settings), train_dataset=train_dataset, **extra)

    return build


@pytest.fixture(scope="session")
def shared_llm(smollm2_path):
    """One vLLM engine on SmolLM2, in float32, for every test that needs one."""
    require("vllm")
    import os

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    from trl.trainer.utils import ensure_master_addr_port
    from vllm import LLM

    ensure_master_addr_port()
    return LLM(
        model=str(smollm2_path),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_batched_tokens=4096,
        max_num_seqs=16,
        max_logprobs=64,
        logprobs_mode="processed_logprobs",
        distributed_executor_backend="external_launcher",
        seed=0,
    )


@pytest.fixture
def vllm(shared_llm, smollm2_path, monkeypatch):
    """Trainers built in the test take the session's engine instead of starting one; returns what they asked for."""
    import trl.generation.vllm_generation as trl_vllm

    asked: dict = {}

    def take(**kwargs):
        asked.update(kwargs)
        assert kwargs["model"] == str(smollm2_path)
        assert kwargs["dtype"] == "float32" and kwargs["logprobs_mode"] == "processed_logprobs"
        assert kwargs["max_logprobs"] <= 64
        shared_llm.reset_prefix_cache()
        return shared_llm

    monkeypatch.setattr(trl_vllm, "LLM", take)
    return asked
