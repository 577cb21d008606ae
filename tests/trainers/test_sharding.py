"""The real trainer in two processes: three optimizer steps equal those of one process."""

import functools
import json
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.engines.test_sglang_server import SGLangWithModel
from tests.parts import require
from tests.ranks import run_on_ranks
from tests.server.fakes import AppServer, serving
from tests.tiny_models import llama, save
from tests.trainers.sharding_worker import train
from trl_support_replay import SupportReplayGRPOConfig
from trl_support_replay.parallel.tensor_parallel import SampleGroups, check_tensor_parallel


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return functools.cache(lambda tied: save_model(tmp_path_factory.mktemp("model"), tied))


def save_model(path, tied):
    """A Llama with more rows than its tokenizer has words."""
    return save(llama(seed=1, vocab_size=104, intermediate_size=48, tie_word_embeddings=tied), path)


def two_processes(*arguments):
    return run_on_ranks(2, "tests.trainers.sharding_worker:train", *arguments)[0]


def ddp(model_path, output, settings):
    return two_processes(model_path, str(output), {"per_device_train_batch_size": 4} | settings)


def zero3(model_path, output, settings, stage=3):
    require("deepspeed")
    return two_processes(model_path, str(output), {"per_device_train_batch_size": 4} | settings, stage)


def zero2(model_path, output, settings):
    return zero3(model_path, output, settings, stage=2)


def tensor_parallel(model_path, output, settings):
    settings = {"per_device_train_batch_size": 8, "tensor_parallel": True} | settings
    return two_processes(model_path, str(output), settings)


@pytest.fixture(scope="module")
def single(model_path, tmp_path_factory):
    """What one process comes to, with the same settings."""
    results = {}

    def run(tied, settings):
        key = tied, json.dumps(settings, sort_keys=True)
        if key not in results:
            settings = {"per_device_train_batch_size": 8} | settings
            results[key] = train(model_path(tied), str(tmp_path_factory.mktemp("single") / "run"), settings)
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
        for metric in ("loss", "entropy", "reward_std", *(name for name in b if name.startswith("support/"))):
            assert a[metric] == pytest.approx(b[metric], abs=1e-5), metric
        for metric in ("support/size_max", "support/synthetic_eos", "num_tokens"):
            assert a[metric] == b[metric], metric
    assert sum(log["support/synthetic_eos"] for log in got["log"][:3]) > 0


FULL = {"beta": 0.1, "kl_scope": "full", "entropy_scope": "full", "entropy_coef": 0.01}
SETTINGS = [
    pytest.param(True, FULL, id="tied, full KL and entropy"),
    pytest.param(False, {}, id="untied", marks=pytest.mark.slow),
    pytest.param(True, {}, id="tied", marks=pytest.mark.slow),
    pytest.param(False, FULL, id="untied, full KL and entropy", marks=pytest.mark.slow),
]
LORA_MARKS = [pytest.mark.slow, pytest.mark.needs("peft")]
LORA = [
    pytest.param(tied, {"lora": True, "beta": 0.1}, id=f"{name}, LoRA", marks=LORA_MARKS)
    for tied, name in ((False, "untied"), (True, "tied"))
]


@pytest.mark.parametrize(("tied", "settings"), SETTINGS + LORA)
def test_ddp(model_path, single, tmp_path, tied, settings):
    assert_same_training(ddp(model_path(tied), tmp_path / "run", settings), single(tied, settings))


@pytest.mark.parametrize(("tied", "settings"), SETTINGS + LORA)
def test_zero3(model_path, single, tmp_path, tied, settings):
    assert_same_training(zero3(model_path(tied), tmp_path / "run", settings), single(tied, settings))


@pytest.mark.parametrize(("tied", "settings"), [pytest.param(False, {}, id="untied"), *SETTINGS[2:]])
def test_zero2(model_path, single, tmp_path, tied, settings):
    """Gradients and optimizer states are sharded, weights are not."""
    assert_same_training(zero2(model_path(tied), tmp_path / "run", settings), single(tied, settings))


@pytest.mark.parametrize(("tied", "settings"), SETTINGS)
def test_tensor_parallel(model_path, single, tmp_path, tied, settings):
    assert_same_training(tensor_parallel(model_path(tied), tmp_path / "run", settings), single(tied, settings))


def test_the_processes_of_a_split_policy_count_and_save_once(model_path, tmp_path):
    """Two steps a generation, and a standard deviation over the batch, which copies of the rewards would change."""
    settings = {"gradient_accumulation_steps": 2, "scale_rewards": "batch", "per_device_train_batch_size": 4}
    one, two = ({"save_traces": str(tmp_path / run / "traces")} for run in ("single", "split"))
    single = train(model_path(False), str(tmp_path / "single"), settings | one)
    split = tensor_parallel(model_path(False), tmp_path / "split", settings | two)
    assert_same_training(split, single)
    shards = [sorted((tmp_path / run / "traces").glob("*.parquet")) for run in ("single", "split")]
    assert [shard.name for shard in shards[1]] == [f"traces-{step:08d}-000-00000.parquet" for step in range(3)]
    for one, other in zip(*shards, strict=True):
        want, found = (pq.read_table(path, columns=["prompt", "completion_ids", "reward"]) for path in (one, other))
        assert found.equals(want)
    prompts = [prompt for shard in shards[1] for prompt in pq.read_table(shard)["prompt"].to_pylist()]
    assert prompts == [str(i) for i in range(6) for _ in range(4)]  # each of them, and none twice


@pytest.mark.parametrize("way", [ddp, zero3, tensor_parallel])
def test_what_was_sampled_is_replayed(model_path, tmp_path, way):
    """Completions that the ranks sample themselves, with the check of every batch on."""
    got = way(model_path(False), tmp_path / "run", {"samples": True})
    for log in got["log"][:3]:
        assert log["support/logprob_gap_max"] <= 1e-4
        assert log["sampling/importance_sampling_ratio_raw/mean"] == pytest.approx(1, abs=1e-3)
        assert log["sampling/outside_10pct"] == 0 and log["support/size_mean"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("way", [ddp, zero3])
def test_a_server_samples_with_the_gathered_weights(model_path, tmp_path, way):
    """The check of every batch compares with what the server drew from the weights it was given."""
    fake = SGLangWithModel(model_path(False))
    with serving(AppServer(fake.app)) as server:
        sglang = {"url": server.url, "weights_dir": str(tmp_path / "weights")}
        got = way(model_path(False), tmp_path / "run", {"sglang": sglang})
    assert [body["weight_version"][-7:] for body in fake.loaded] == ["-000000", "-000001", "-000002"]
    assert all(log["support/logprob_gap_max"] <= 1e-4 for log in got["log"][:3])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"per_device_train_batch_size": 2}, r"steps_per_generation = 2 with num_generations=4 .*\(tp_size=2\)"),
        (
            {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 6},
            r"per_device_eval_batch_size = 6 with num_generations=4 .* to a multiple of 4",
        ),
        (
            {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_generations_eval": 8},
            "per_device_eval_batch_size = 4 with num_generations_eval=8",
        ),
    ],
)
def test_a_split_policy_with_parts_of_groups_is_refused(settings, message):
    defaults = {"num_generations": 4, "num_generations_eval": None, "per_device_eval_batch_size": 4}
    settings = defaults | {"steps_per_generation": 1} | settings
    args = SimpleNamespace(use_vllm=False, world_size=2, generation_batch_size=4, seed=0, **settings)
    trainer = SimpleNamespace(args=args, model=SimpleNamespace(tp_size=2), eval_dataset=[1], accelerator=None)
    with pytest.raises(ValueError, match=message):
        SampleGroups.of(trainer)


def test_a_split_policy_with_vllm_is_refused(model_path):
    model = LlamaForCausalLM.from_pretrained(model_path(False))
    model._tp_size = 2
    args = SupportReplayGRPOConfig(use_cpu=True, bf16=False, use_vllm=True, vllm_mode="colocate", top_k=5)
    with pytest.raises(ValueError, match=r"use_vllm=True .*tp_size=2.* Set use_vllm=False"):
        check_tensor_parallel(model, args)
