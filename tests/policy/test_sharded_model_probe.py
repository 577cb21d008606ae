"""The probe of a sharded model: every rank comes to the same answer, and the shards stay as they were."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.parts import PARTS
from tests.ranks import run_on_ranks
from trl_support_replay.policy.model_probe import Probe, UnreplayableModelError
from trl_support_replay.policy.noise import silence
from trl_support_replay.policy.replay_head import add_replay_head
from trl_support_replay.trainers.replayed_models import replayed_scores

BACKENDS = ("ddp", "fsdp1", "fsdp2", "zero3")


class Halving(LlamaForCausalLM):
    """Halves its logits, after its head."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits / 2
        return output


def shard(model, backend):
    if backend == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if backend == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if backend == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer)
        return fully_shard(model)
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), config=config)
    return model  # as the trainer calls it: the hooks are on the modules


def probe(backend: str, model_class: type, silent: bool) -> tuple[str, list[bool]]:
    """What came of it on this rank, and whether each parameter is sharded, as FSDP2 and ZeRO-3 show it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=53,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_dropout=0.2,
        attn_implementation="eager",
    )
    model = model_class(config)
    with torch.no_grad():
        model.lm_head.weight.normal_()
    add_replay_head(model)
    model = shard(model, backend)
    said = "passed"
    try:
        found = Probe.run(model)
        if silent:
            silence(model)
        found.check_training_mode(model)
        found.check_scores(model, functools.partial(replayed_scores, model))
    except UnreplayableModelError as error:
        said = str(error)
    zero3 = [getattr(getattr(p, "ds_status", None), "name", None) == "NOT_AVAILABLE" for p in model.parameters()]
    return said, [isinstance(p, DTensor) or z for p, z in zip(model.parameters(), zero3, strict=True)]


def run(backends: tuple[str, ...]) -> dict[str, dict[str, tuple[str, list[bool]]]]:
    return {
        backend: {
            "right": probe(backend, LlamaForCausalLM, silent=True),
            "noisy": probe(backend, LlamaForCausalLM, silent=False),
            "wrong": probe(backend, Halving, silent=True),
        }
        for backend in backends
    }


@functools.cache
def outcomes():
    here = BACKENDS[:3] if PARTS["deepspeed"].missing else BACKENDS
    return run_on_ranks(2, "tests.policy.test_sharded_model_probe:run", here)


@pytest.mark.parametrize("backend", [*BACKENDS[:3], pytest.param("zero3", marks=pytest.mark.needs("deepspeed"))])
def test_every_rank_comes_to_the_same_answer(backend):
    first, second = (outcome[backend] for outcome in outcomes())
    assert first == second
    assert first["right"][0] == "passed"
    assert first["noisy"][0].startswith("LlamaForCausalLM draws random numbers in training mode")
    assert first["wrong"][0].startswith("The scores of Halving cannot be replayed")
    if backend in ("fsdp2", "zero3"):
        assert all(all(sharded) for _, sharded in first.values())
