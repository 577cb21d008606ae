"""The scorer under every way of sharding a model: each rank's scores and all gradients against one process.

Ranks score different numbers of tokens, singletons alone, or nothing, and must still agree on every collective.
"""

from __future__ import annotations

import functools

import pytest

from tests.ranks import run_on_ranks

from .scorer_sharding_cases import FSDP2, cases

RUN = "tests.distributed.scorer_sharding_cases:run"
GROUPS = {
    "replicated": ("ddp", "tp"),
    "fsdp": (*FSDP2, "fsdp2 own rounding", "fsdp1", "fsdp2 own, fetched"),
    "zero": ("zero3", "zero3 frozen, fetched"),
}


@functools.cache
def outcome(group: str, world: int) -> list[dict[str, list[str]]]:
    return run_on_ranks(world, RUN, GROUPS[group])


def parameters(world: int):
    return [(group, world, case) for group, backends in GROUPS.items() for case in cases(backends, world)]


def check(group, world, case):
    for rank, results in enumerate(outcome(group, world)):
        assert not results[case], f"rank {rank}: {results[case]}"


@pytest.mark.parametrize(("group", "world", "case"), parameters(2))
def test_two_ranks(group, world, case):
    check(group, world, case)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "world", "case"), parameters(4))
def test_four_ranks(group, world, case):
    check(group, world, case)
