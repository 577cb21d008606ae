"""Trains a tiny model for three steps on fixed rollouts, in as many processes as there are.

    accelerate launch ... -m tests.trainers.sharding_worker MODEL OUTPUT '{"per_device_train_batch_size": 2}'

The rollouts depend only on the prompt and its place in the batch, so any number of processes trains on the same data.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from accelerate import ParallelismConfig
from datasets import Dataset
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.trainers.conftest import QUIET
from trl_support_replay import SupportReplayGRPOConfig, SupportReplayGRPOTrainer
from trl_support_replay.engines.sglang_server import SGLangRollout

VOCABULARY, EOS = 96, 2
LENGTH = 10


def rollout(prompts, trainer):
    """Random completions with random supports; the log-probs are the policy's own, so that the ratio is 1."""
    prompt_ids, completion_ids, supports = [], [], []
    for i, prompt in enumerate(prompts):
        rank = 0 if trainer.accelerator.state.device_mesh is not None else trainer.accelerator.process_index
        seed = [int(prompt), trainer.state.global_step, rank * len(prompts) + i]
        rng = np.random.default_rng(seed)
        length = int(rng.integers(2, LENGTH + 1))
        ids = rng.integers(3, VOCABULARY, length)
        sizes = rng.choice([1, 1, 2, 5, 12], length)
        rows = [
            list({int(t), *rng.integers(0, VOCABULARY, size - 1).tolist()}) for t, size in zip(ids, sizes, strict=True)
        ]
        if rng.random() < 0.3:  # an end that nobody sampled
            ids, rows = np.append(ids[:-1], EOS), [*rows[:-1], []]
        prompt_ids.append(rng.integers(3, VOCABULARY, int(rng.integers(3, 7))).tolist())
        completion_ids.append(ids.tolist())
        supports.append(rows)
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": [[-1.0] * len(ids) for ids in completion_ids],
        "support_ids": supports,
    }


def reward(completion_ids, **_):
    return [float(sum(ids) % 11) for ids in completion_ids]


def zero(stage: int) -> dict[str, Any]:
    """Configuration of DeepSpeed."""
    return {
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,  # shard even the small weights of a tiny model
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.0,  # left out, Accelerate clips at 1
        "zero_allow_untested_optimizer": True,
    }


def train(model: str, output: str, settings: dict[str, Any], zero_stage: int | None = None) -> dict[str, Any] | None:
    """Weights, log and number of processes after three steps; `None` on all processes but the first.

    Args:
        model: folder of the model.
        output: folder of the run.
        settings: of the configuration, and `tensor_parallel`, `samples`, `sglang` and `lora`.
        zero_stage: of DeepSpeed, said as `accelerate launch` says it.
    """
    if zero_stage is None:
        return _train(model, Path(output), dict(settings))
    Path(output).mkdir(parents=True, exist_ok=True)
    config = Path(output) / f"deepspeed{os.environ['RANK']}.json"
    config.write_text(json.dumps(zero(zero_stage)))
    launched = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config)}
    with mock.patch.dict(os.environ, launched | {"ACCELERATE_DEEPSPEED_ZERO3_INIT": "false"}):
        try:
            return _train(model, Path(output), dict(settings))
        finally:
            unset_hf_deepspeed_config()


def _train(model: Any, output: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    peft_config = None
    tensor_parallel = settings.pop("tensor_parallel", False)
    samples = settings.pop("samples", False)
    sglang = settings.pop("sglang", None)
    if settings.pop("lora", False):
        from peft import LoraConfig

        peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=True)
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    defaults = QUIET | {
        "output_dir": str(output),
        # Accelerate finds no backend for DeepSpeed on a CPU by itself, and use_cpu would win over DeepSpeed.
        "use_cpu": not deepspeed,
        "ddp_backend": "gloo" if deepspeed else None,
        "max_steps": 3,
        "max_completion_length": LENGTH,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "seed": 5,
        "top_p": 0.9,
        "use_vllm": False,
        "replay_check": "raise" if samples or sglang else "off",  # the log-probs of a made-up rollout are no policy's
        "loss_type": "grpo",
        "shuffle_dataset": False,
    }
    args = SupportReplayGRPOConfig(**defaults | settings)
    if tensor_parallel:
        # Accelerate admits a ParallelismConfig on accelerators alone; all else that it does for one works on CPUs too.
        ParallelismConfig._validate_accelerator = lambda self, accelerator: None
        distributed = DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"]), tp_plan="auto")
        model = AutoModelForCausalLM.from_pretrained(model, distributed_config=distributed)
    rollout_func = None if samples else rollout
    if sglang is not None:
        rollout_func = SGLangRollout([sglang["url"]], sglang["weights_dir"])
    trainer = SupportReplayGRPOTrainer(
        model,
        reward,
        args,
        train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(16)]}),
        rollout_func=rollout_func,
        peft_config=peft_config,
    )
    trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}
    state = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
    if not trainer.accelerator.is_main_process:
        return None
    state = {name: value.float().cpu().clone() for name, value in state.items()}
    return {"state": state, "log": trainer.state.log_history, "processes": trainer.accelerator.num_processes}


if __name__ == "__main__":
    model, output, settings = sys.argv[1:]
    if (result := train(model, output, json.loads(settings))) is not None:
        torch.save(result, Path(output) / "result.pt")
