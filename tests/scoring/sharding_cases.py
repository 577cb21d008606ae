"""One rank's part of the scorer tests under data-parallel sharding and Hugging Face's way of tensor parallelism.

Every rank scores its own tokens with a small model whose parameters a backend shards, and compares scores and gradients
with a float64 copy of the model in one process.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from transformers import PreTrainedConfig

from tests.parts import why_not
from tests.scoring.oracle import scores_from_logits
from trl_support_replay.scoring import SupportCSR, lm_head_from_model, score_support
from trl_support_replay.scoring.row_fetch import RowShards

from .tensor_parallel_cases import counted_collectives

VOCAB, WIDTH, TEMPERATURE = 53, 6, 0.8
PARTS = ("plain", "bias", "softcap", "lora")
OUTPUTS = {"support": ("logprobs", "support_entropy"), "every": ("logprobs", "full_entropy", "log_mass")}
FSDP2 = ("fsdp2 root", "fsdp2 group", "fsdp2 own")
# What the ranks score: some tokens, singletons alone, nothing at all, many tokens in several blocks.
KINDS = {2: (("mixed", "none"), ("singletons", "many")), 4: (("mixed", "singletons", "none", "many"),)}


class TinyLM(nn.Module):
    """Embedding, norm and head, as a causal language model arranges them; scores inside its own forward."""

    def __init__(self, parts: str, tied: bool, vocab: int):
        super().__init__()
        self.config = PreTrainedConfig(tie_word_embeddings=tied)
        if parts == "softcap":
            self.config.final_logit_softcapping, self.config.logit_scale = 1.5, 0.6
        self.embed = nn.Embedding(vocab, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, vocab, bias=parts == "bias")
        if tied:
            self.lm_head.weight = self.embed.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.embed(input_ids))

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        z = self.lm_head(self.hidden(input_ids)) * getattr(self.config, "logit_scale", 1.0)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return (z if cap is None else cap * torch.tanh(z / cap)) / TEMPERATURE

    def forward(self, input_ids, sampled, support, outputs):
        scores = score_support(
            self.hidden(input_ids),
            lm_head_from_model(self),
            sampled,
            support,
            temperature=TEMPERATURE,
            outputs=outputs,
            empty_rows="full",
        )
        return tuple(getattr(scores, name) for name in outputs)


def build(parts: str, tied: bool, vocab: int = VOCAB) -> TinyLM:
    torch.manual_seed(3)
    model = TinyLM(parts, tied, vocab)
    if parts == "lora":
        from peft import LoraConfig, inject_adapter_in_model

        model = inject_adapter_in_model(LoraConfig(r=2, lora_alpha=3, target_modules=["lm_head"]), model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.requires_grad_()


def tokens_of(kind: str, seed: int) -> tuple[torch.Tensor, list[int], list[list[int]]]:
    rng = np.random.default_rng(seed)
    count = {"mixed": 12, "none": 0, "singletons": 5, "many": 70}[kind]
    rows = []
    for i in range(count):
        size = 1 if kind == "singletons" or i % 3 == 0 else int(rng.integers(2, 12))
        rows.append([] if kind == "mixed" and i == 4 else rng.permutation(VOCAB)[:size].tolist())
    sampled = [int(row[-1]) if row else 7 for row in rows]
    return torch.tensor(rng.integers(0, VOCAB, count), dtype=torch.long), sampled, rows


def loss_of(scores, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed + 100)
    return sum((x * torch.tensor(rng.standard_normal(len(x)))).sum() for x in scores) / 20


def wrap(model: TinyLM, backend: str, tied: bool) -> Any:
    if backend == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if backend == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if backend.startswith("fsdp2"):
        policy = MixedPrecisionPolicy(output_dtype=torch.bfloat16) if backend.endswith("rounding") else None
        settings = {} if policy is None else {"mp_policy": policy}
        embed = [model.embed] if tied else []
        if "group" in backend:
            fully_shard([*embed, model.norm, model.lm_head], **settings)
        elif "own" in backend:
            units = [*embed, model.lm_head]
            fully_shard(units if tied else model.lm_head, **settings)
        return fully_shard(model)
    if backend == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        head = model.lm_head
        base = getattr(head, "base_layer", head)
        base.weight = nn.Parameter(distribute_tensor(base.weight.detach(), mesh, [Shard(0)]))
        if base.bias is not None:
            base.bias = nn.Parameter(distribute_tensor(base.bias.detach(), mesh, [Shard(0)]))
        if tied:
            layout = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
            parallelize_module(model.embed, mesh, layout)
            base.weight = model.embed.weight
        return model
    raise ValueError(backend)


def gradient(parameter: nn.Parameter) -> torch.Tensor:
    if hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(parameter)
    grad = parameter.grad
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def difference(name: str, got: torch.Tensor, wanted: torch.Tensor) -> list[str]:
    try:
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-6, msg=f"{name}: {{}}".format)
    except AssertionError as error:
        return [str(error)]
    return []


def check(backend: str, parts: str, tied: bool, outputs: tuple[str, ...], kinds: tuple[str, ...]) -> list[str]:
    """What differs, found without leaving early: a rank that raised would leave the others waiting."""
    problems = []
    rank, world = dist.get_rank(), dist.get_world_size()
    fetched = backend.endswith("fetched")
    # With more head rows than four times those that anybody needs, they alone are fetched.
    model = build(parts, tied, 4 * VOCAB + 4 if fetched else VOCAB)
    if backend.startswith("zero3 frozen"):
        model.lm_head.requires_grad_(False)
    exact = copy.deepcopy(model).double()
    names = [name for name, _ in model.named_parameters()]
    tensor_parallel = backend == "tp"
    data = [tokens_of(kind, seed) for seed, kind in enumerate(kinds)]
    if tensor_parallel:  # the ranks share their tokens
        data = [data[0]] * world
    input_ids, sampled, rows = data[rank]

    engine = None
    if backend.startswith("zero3"):
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        }
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), config=config
        )
    wrapped = engine or wrap(model, backend, tied)
    arguments = input_ids, torch.tensor(sampled, dtype=torch.long), SupportCSR.from_lists(rows), outputs
    with torch.no_grad():
        wrapped(*arguments)  # as TRL scores the old policy
    with (
        counted_collectives() as forward,
        patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as sent,
    ):
        scores = wrapped(*arguments)
    if bool(sent.call_count) != (fetched and outputs == OUTPUTS["support"] and "mixed" not in kinds):
        problems.append(f"{sent.call_count} exchanges of head rows")
    if tensor_parallel and forward != {"MAX": 1, "SUM": 1}:
        problems.append(f"forward made the collectives {forward}")
    loss = loss_of(scores, 0 if tensor_parallel else rank)
    if engine is not None:
        engine.backward(loss)
    else:
        loss.backward()

    total = sum(p.sum() * 0 for p in exact.parameters())
    for other, (ids, taken, supports) in enumerate(data[:1] if tensor_parallel else data):
        if not len(ids):
            continue
        expected = scores_from_logits(exact.logits(ids), taken, supports)
        total = total + loss_of([expected[name] for name in outputs], other)
        if other == rank or tensor_parallel:
            for name, got in zip(outputs, scores, strict=True):
                problems += difference(name, got, expected[name])
    (total if tensor_parallel else total / world).backward()
    wanted = dict(exact.named_parameters())
    parameters = dict(model.named_parameters())
    for name in names:
        if not parameters[name].requires_grad:
            continue
        if backend == "fsdp1":
            with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
                got = dict(model.named_parameters())[name].grad.clone()
        else:
            got = gradient(parameters[name])
        problems += difference(f"gradient of {name}", got, wanted[name].grad)
    if engine is not None:
        engine.destroy()
    return problems


def cases(backends: tuple[str, ...], world: int) -> dict[str, tuple]:
    found = {}
    for backend, parts, tied in itertools.product(backends, PARTS, (False, True)):
        for kinds, outputs in itertools.product(KINDS[world], OUTPUTS):
            if backend == "tp" and kinds != KINDS[world][0]:
                continue
            if "frozen" in backend and (tied or parts == "lora"):
                continue
            if backend == "fsdp2 own, fetched" and (tied or parts == "lora"):  # then it is not alone, or has a part
                continue
            if "rounding" in backend and (parts != "plain" or tied):  # tied, it would round the embeddings too
                continue
            name = f"{backend}-{parts}-{'tied' if tied else 'untied'}-{outputs}-{'/'.join(kinds)}"
            found[name] = (backend, parts, tied, OUTPUTS[outputs], kinds)
    return found


def run(backends: tuple[str, ...]) -> dict[str, list[str]]:
    """For each case what went wrong on this rank."""
    found = cases(backends, dist.get_world_size())
    if why_not("peft"):
        found = {name: case for name, case in found.items() if "-lora-" not in name}
    return {name: check(*case) for name, case in found.items()}


def beyond_the_rows() -> str:
    """What this rank reads when only rank 1 asks for rows that nobody holds."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shards = RowShards(torch.zeros(3, 2), 3 * world - 1, 3, dist.group.WORLD, torch.float32, divide_gradient=False)
    try:
        shards.fetch(np.array([-1, 0, 3 * world - 1]) if rank == 1 else np.array([0]))
    except ValueError as error:
        return str(error)
    return "no error"
