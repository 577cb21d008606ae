"""One rank's part of the tensor-parallel scorer tests: scores and gradients against a float64 oracle of the whole."""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections import Counter
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from tests.scoring.oracle import oracle_scores
from trl_support_replay.scoring import (
    CandidateShifts,
    LMHead,
    LoRAFactors,
    SupportCSR,
    VocabShard,
    score_support,
    score_support_from_logits,
)
from trl_support_replay.scoring.arguments import OUTPUTS
from trl_support_replay.traces.shifts import LogitShifts

VOCAB, WIDTH, TEMPERATURE = 53, 6, 0.8
SUPPORT = ("logprobs", "support_entropy")
# Uneven shards, and one without any row.
BOUNDS = {2: [[0, 26, 53], [0, 5, 53], [0, 53, 53]], 4: [[0, 14, 28, 42, 53], [0, 3, 3, 50, 53]]}
PARTS = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 1.5, "logit_scale": 0.6},
    "lora": {"lora": True},
    "all": {"bias": True, "softcap": 1.5, "lora": True},
}
SHIFTS = LogitShifts(1.3, 0.7, 0.5, {2: 1.5, 30: -2.0})


@contextlib.contextmanager
def counted_collectives():
    """Counts every collective of the default group by operation."""
    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast"):
            original = getattr(dist, name)

            def call(*args, _name=name, _original=original, **kwargs):
                op = str(kwargs.get("op", dist.ReduceOp.SUM)).rsplit(".", 1)[-1] if _name == "all_reduce" else _name
                counts[op] += 1
                return _original(*args, **kwargs)

            stack.enter_context(mock.patch.object(dist, name, call))
        yield counts


class _GatherSequence(torch.autograd.Function):
    """Whole sequences from shards of tokens; backward sums and scatters, as sequence parallelism does."""

    @staticmethod
    def forward(ctx, shard):
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, shard.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def make_rows(kind: str, rng: np.random.Generator) -> tuple[list[int], list[list[int]]]:
    num_tokens = {"none": 0}.get(kind, 24)
    rows = []
    for i in range(num_tokens):
        size = 1 if kind == "singletons" or i % 3 == 0 else int(rng.integers(2, 12))
        # Some rows lie in one shard alone.
        ids = rng.permutation(VOCAB if i % 2 else 5)[:size].tolist()
        rows.append([] if kind == "mixed" and i in (4, 20) else ids)
    return [int(row[-1]) if row else 7 for row in rows], rows


def check(parts: str, implementation: str, outputs: tuple[str, ...], bounds: list[int], kind: str, layout: str):
    rank, world = dist.get_rank(), dist.get_world_size()
    start, stop = bounds[rank], bounds[rank + 1]
    rng = np.random.default_rng(5)
    options = PARTS[parts]

    def leaf(*shape):
        return torch.tensor(rng.standard_normal(shape) * 0.5).float().requires_grad_()

    sampled, rows = make_rows(kind, rng)
    whole = {"hidden": leaf(len(rows), WIDTH), "weight": leaf(VOCAB, WIDTH)}
    if options.get("bias"):
        whole["bias"] = leaf(VOCAB)
    if options.get("lora"):
        whole |= {"lora_a": leaf(2, WIDTH), "lora_b": leaf(VOCAB, 2)}
    upstream = {name: torch.tensor(rng.standard_normal(len(rows))) / max(len(rows), 1) for name in OUTPUTS}

    def make_head(tensors, shard=None):
        lora = LoRAFactors(tensors["lora_a"], tensors["lora_b"], 0.7) if "lora_a" in tensors else None
        return LMHead(
            tensors["weight"],
            tensors.get("bias"),
            shard=shard,
            logit_scale=options.get("logit_scale", 1.0),
            softcap=options.get("softcap"),
            lora=lora,
        )

    local = {
        name: (x[start:stop] if name in ("weight", "bias", "lora_b") else x).detach().clone().requires_grad_()
        for name, x in whole.items()
    }
    sequence_parallel = layout == "sequence"
    if sequence_parallel:
        local["hidden"] = whole["hidden"].detach().chunk(world)[rank].clone().requires_grad_()
    shard = VocabShard(start, stop, dist.group.WORLD, reduce_hidden_grad=not sequence_parallel)
    ids, support = torch.tensor(sampled, dtype=torch.long), SupportCSR.from_lists(rows)
    shifts = None
    if kind == "shifted":
        of_tokens = np.array(sampled), support.token_ids, support.offsets
        shifts = CandidateShifts(*SHIFTS.of_request(np.array([1, 40]), *of_tokens))
        support = SupportCSR.from_numpy(support.token_ids, support.offsets, shifts=shifts)
    settings = {"temperature": TEMPERATURE, "outputs": outputs, "empty_rows": "full"}
    hidden = _GatherSequence.apply(local["hidden"]) if sequence_parallel else local["hidden"]
    with counted_collectives() as forward:
        if implementation == "from_logits":
            head = make_head(local)
            logits = (hidden @ head.weight.T + (0 if head.bias is None else head.bias)) * head.logit_scale
            logits = logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
            scores = score_support_from_logits(logits, ids, support, shard=shard, **settings)
        else:
            scores = score_support(
                hidden, make_head(local, shard), ids, support, implementation=implementation, **settings
            )
    assert forward == {"MAX": 1, "SUM": 1}, forward
    loss = sum((getattr(scores, name) * upstream[name]).sum() for name in outputs)
    with counted_collectives() as backward:
        loss.backward()
    hidden_sums = {"SUM": 1} if not sequence_parallel or "lora_a" in whole else {}
    if sequence_parallel:
        hidden_sums["SUM"] = hidden_sums.get("SUM", 0) + 1  # its own
    if implementation == "from_logits":
        hidden_sums = {}
        dist.all_reduce(local["hidden"].grad)
    assert backward == hidden_sums, backward

    exact = {name: x.detach().double().requires_grad_() for name, x in whole.items()}
    want_loss = sum(x.sum() * 0 for x in exact.values())
    if rows:
        expected = oracle_scores(exact["hidden"], make_head(exact), sampled, rows, TEMPERATURE, shifts)
        for name in outputs:
            torch.testing.assert_close(getattr(scores, name).double(), expected[name], rtol=1e-6, atol=1e-6)
            want_loss = want_loss + (expected[name] * upstream[name]).sum()
    want_loss.backward()
    for name, x in local.items():
        want = exact[name].grad
        if name in ("weight", "bias", "lora_b"):
            want = want[start:stop]
        if sequence_parallel and name == "hidden":
            want = want.chunk(world)[rank]
        torch.testing.assert_close(x.grad.double(), want, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def check_refusals():
    """Supports that no shard alone can see are wrong."""
    world, rank = dist.get_world_size(), dist.get_rank()
    start, stop = BOUNDS[world][0][rank : rank + 2]
    head = LMHead(torch.ones(stop - start, WIDTH), shard=VocabShard(start, stop, dist.group.WORLD))
    for rows, sampled, message in (
        ([[1, 50], [1, 50]], [1, 30], "Token 1 was sampled as id 30, which is not among the 2 ids of its support;"),
        ([[1, 50], [50]], [1, 30], "Token 1 was sampled as id 30, which is not among the 1 ids of its support;"),
        ([[1, 50], []], [1, VOCAB], "not among the ids of its support (without one: of the head). First: token 1;"),
        ([[1, 50], [1, VOCAB]], [1, 1], "an id beyond the head. First: token 1;"),
        ([[1, 50], [-1, 1]], [1, 1], "an id beyond the head. First: token 1;"),
        ([[1, 50], [VOCAB]], [1, VOCAB], "an id beyond the head. First: token 1;"),
    ):
        with counted_collectives() as forward:
            try:
                score_support(
                    torch.ones(2, WIDTH), head, torch.tensor(sampled), SupportCSR.from_lists(rows), empty_rows="full"
                )
            except ValueError as error:
                assert message in str(error), error
                assert "; so for 1 of 2 tokens" in str(error), error
            else:
                raise AssertionError(f"tokens {sampled} were scored over {rows}")
        assert forward == {"MAX": 1, "SUM": 1}, forward


def cases(world: int) -> dict[str, tuple]:
    found: dict[str, tuple] = {}

    def add(*case):
        found["-".join("support" if x == SUPPORT else "every" if x == OUTPUTS else str(x) for x in case)] = case

    for parts, implementation, outputs in itertools.product(
        PARTS, ("reference", "union", "sparse"), (SUPPORT, OUTPUTS)
    ):
        add(parts, implementation, outputs, BOUNDS[world][0], "mixed", "replicated")
    for bounds, implementation, outputs in itertools.product(
        BOUNDS[world][1:], ("reference", "sparse", "from_logits"), (SUPPORT, OUTPUTS)
    ):
        add("bias", implementation, outputs, bounds, "mixed", "replicated")
    for kind, parts, outputs in itertools.product(("singletons", "none"), ("plain", "lora"), (SUPPORT, OUTPUTS)):
        add(parts, "sparse", outputs, BOUNDS[world][0], kind, "replicated")
    for parts, outputs in itertools.product(("plain", "lora"), (SUPPORT, OUTPUTS)):
        add(parts, "sparse", outputs, BOUNDS[world][0], "mixed", "sequence")
    for bounds, implementation in itertools.product(BOUNDS[world], ("sparse", "from_logits")):
        add("bias", implementation, SUPPORT, bounds, "shifted", "replicated")
    return found


def run() -> dict[str, str | None]:
    """For each case `None`, or what went wrong on this rank."""
    results: dict[str, str | None] = {}
    for name, case in cases(dist.get_world_size()).items():
        try:
            check(*case)
            results[name] = None
        except AssertionError:
            results[name] = traceback.format_exc()
    check_refusals()
    return results
