"""Trainers of tiny models, and one vLLM engine for the whole session."""

from __future__ import annotations

import pytest
from datasets import Dataset

from tests.parts import require
from trl_support_replay import SupportReplayGRPOConfig, SupportReplayGRPOTrainer

# A short run on a CPU that says nothing.
QUIET = {
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
}


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
        settings = QUIET | {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 2,
            "max_completion_length": 12,
            "learning_rate": 1e-3,
            "seed": 3,
        }
        settings |= kwargs
        reward_funcs = extra.pop("reward_funcs", checksum_reward)
        train_dataset = extra.pop("train_dataset", sums())
        return trainer_cls(model, reward_funcs, config_cls(**settings), train_dataset=train_dataset, **extra)

    return build


def start_llm(path):
    """A vLLM engine in this process, as trainers start it."""
    require("vllm")
    import os

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    from trl.trainer.utils import ensure_master_addr_port
    from vllm import LLM

    from trl_support_replay.engine_outputs.vllm_capture import Capture

    ensure_master_addr_port()
    return LLM(
        model=path,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_batched_tokens=4096,
        max_num_seqs=16,
        max_logprobs=64,
        logprobs_mode="processed_logprobs",
        distributed_executor_backend="external_launcher",
        seed=0,
        **Capture("worker").engine_kwargs(0, "float32"),
    )


@pytest.fixture(scope="session")
def shared_llm(tiny_llama_path):
    """One vLLM engine on the tiny Llama, in float32, for every test that needs one."""
    return start_llm(tiny_llama_path)


@pytest.fixture(scope="session")
def smollm2_llm(smollm2_path):
    """A vLLM engine on the real SmolLM2."""
    return start_llm(str(smollm2_path))


def lend(monkeypatch, llm, path):
    """Let trainers take the engine instead of starting one; returns what they ask for."""
    import trl.generation.vllm_generation as trl_vllm

    asked: dict = {}

    def take(**kwargs):
        asked.update(kwargs)
        assert kwargs["model"] == path
        assert kwargs["dtype"] == "float32" and kwargs["logprobs_mode"] == "processed_logprobs"
        assert kwargs.get("max_logprobs", 0) <= 64
        llm.reset_prefix_cache()
        return llm

    monkeypatch.setattr(trl_vllm, "LLM", take)
    return asked


@pytest.fixture
def vllm(shared_llm, tiny_llama_path, monkeypatch):
    """Trainers built in the test take the session's engine; returns what they asked for."""
    return lend(monkeypatch, shared_llm, tiny_llama_path)
