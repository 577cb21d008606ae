"""The scorer under every way of sharding a model: each rank's scores and all gradients against one process.

Ranks score different numbers of tokens, singletons alone, or nothing, and must still agree on every collective.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.parts import require
from tests.ranks import run_on_ranks
from trl_support_replay.scoring.row_fetch import row_shards

from .sharding_cases import FSDP2, cases

RUN = "tests.scoring.sharding_cases:run"
GROUPS = {
    "replicated": ("ddp", "tp"),
    "fsdp": (*FSDP2, "fsdp2 own rounding", "fsdp1", "fsdp2 own, fetched"),
    "zero": ("zero3", "zero3 frozen, fetched"),
}


@functools.cache
def outcome(group: str, world: int) -> list[dict[str, list[str]]]:
    if group == "zero":
        require("deepspeed")
    return run_on_ranks(world, RUN, GROUPS[group])


def parameters(world: int):
    return [(group, world, case) for group, backends in GROUPS.items() for case in cases(backends, world)]


def check(group, world, case):
    if "-lora-" in case:
        require("peft")
    for rank, results in enumerate(outcome(group, world)):
        assert not results[case], f"rank {rank}: {results[case]}"


@pytest.mark.parametrize(("group", "world", "case"), parameters(2))
def test_two_ranks(group, world, case):
    check(group, world, case)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "world", "case"), parameters(4))
def test_four_ranks(group, world, case):
    check(group, world, case)


def test_every_rank_refuses_candidates_of_one_that_lie_beyond_the_head():
    message = "2 candidates of rank 1, -1 among them, lie beyond the head's 5 rows."
    assert run_on_ranks(2, "tests.scoring.sharding_cases:beyond_the_rows") == [message] * 2


@pytest.mark.parametrize(
    ("partition", "fetched"),
    [
        ({}, True),
        ({"dtype": torch.int8}, False),  # quantised
        ({"device": "meta"}, False),  # as when offloaded: not where the parameter is used
        ({"size": (5,)}, False),  # ends within a row
    ],
)
@pytest.mark.needs("deepspeed")
def test_zero3_partitions_that_hold_no_rows_as_they_are(partition, fetched, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    parameter = SimpleNamespace(
        ds_tensor=torch.zeros(**{"size": (6,), **partition}),
        ds_process_group=None,
        ds_shape=torch.Size((4, 3)),
        ds_status=ZeroParamStatus.NOT_AVAILABLE,
        device=torch.device("cpu"),
        dtype=torch.float32,
        requires_grad=False,
    )
    assert (row_shards(nn.Linear(3, 4), parameter) is not None) == fetched
