"""The real trainer in two processes: three optimizer steps equal those of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.trainer.conftest import character_tokenizer

WORKER = Path(__file__).with_name("trainer_worker.py")
TORCHRUN = ["torch.distributed.run", "--standalone"]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model_path(request, tmp_path_factory):
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=104,  # more rows than the tokenizer has words
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=request.param,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return str(path)


def launch(arguments, model, output, settings, timeout=240):
    command = [sys.executable, "-m", *arguments, str(WORKER), model, str(output), json.dumps(settings)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    output.mkdir()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return torch.load(output / "result.pt")


@pytest.fixture(scope="module")
def single(model_path, tmp_path_factory):
    results = {}

    def run(**settings):
        key = json.dumps(settings, sort_keys=True)
        if key not in results:
            output = tmp_path_factory.mktemp("single") / "run"
            results[key] = launch(
                TORCHRUN + ["--nproc_per_node=1"], model_path, output, {"per_device_train_batch_size": 8} | settings
            )
        return results[key]

    return run


def assert_same_training(got, want):
    names = {name.removeprefix("module.") for name in want["state"]}
    state = {name.removeprefix("module."): value for name, value in got["state"].items()}
    assert names <= set(state) | {"lm_head.weight"}
    moved = 0.0
    for name, value in want["state"].items():
        if name in state:  # a tied head may be saved once
            torch.testing.assert_close(state[name], value, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
            moved += value.abs().sum().item()
    assert moved > 0
    for a, b in zip(got["log"][:3], want["log"][:3], strict=True):
        for metric in ("loss", "support/size_mean", "support/singleton_fraction", "entropy"):
            assert a[metric] == pytest.approx(b[metric], abs=1e-5), metric


def zero_config(tmp_path, stage):
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,  # shard even the small weights of a tiny model
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    deepspeed = tmp_path / "deepspeed.json"
    deepspeed.write_text(
        json.dumps(
            {
                "zero_optimization": zero,
                "train_micro_batch_size_per_gpu": "auto",
                "train_batch_size": "auto",
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": 0.0,  # left out, Accelerate clips at 1
                "zero_allow_untested_optimizer": True,
            }
        )
    )
    config = tmp_path / "accelerate.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nuse_cpu: true\nnum_machines: 1\n"
        "num_processes: 2\nmachine_rank: 0\nmain_training_function: main\ndeepspeed_config:\n"
        f"  deepspeed_config_file: {deepspeed}\n  zero3_init_flag: false\n"
    )
    return ["accelerate.commands.launch", "--config_file", str(config)]


SETTINGS = [
    pytest.param({}, id="plain"),
    pytest.param(
        {"beta": 0.1, "kl_scope": "full", "entropy_scope": "full", "entropy_coef": 0.01}, id="full KL and entropy"
    ),
    pytest.param({"lora": True, "beta": 0.1}, id="LoRA", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_ddp(model_path, single, tmp_path, settings):
    got = launch(
        [*TORCHRUN, "--nproc_per_node=2"],
        model_path,
        tmp_path / "run",
        settings | {"per_device_train_batch_size": 4},
    )
    assert_same_training(got, single(**settings))


@pytest.mark.parametrize("settings", SETTINGS)
def test_zero3(model_path, single, tmp_path, settings):
    got = launch(zero_config(tmp_path, 3), model_path, tmp_path / "run", settings | {"per_device_train_batch_size": 4})
    assert_same_training(got, single(**settings))
