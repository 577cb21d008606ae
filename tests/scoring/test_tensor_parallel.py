"""The scorer over a vocabulary that is split between ranks."""

from __future__ import annotations

import functools

import pytest

from tests.ranks import run_on_ranks

from .tensor_parallel_cases import cases

RUN = "tests.scoring.tensor_parallel_cases:run"


@functools.cache
def outcome(world: int) -> list[dict[str, str | None]]:
    return run_on_ranks(world, RUN)


SLOW = {2: (), 4: pytest.mark.slow}


@pytest.mark.parametrize(
    ("world", "case"), [pytest.param(world, case, marks=SLOW[world]) for world in SLOW for case in cases(world)]
)
def test_scores_gradients_and_collectives(world, case):
    """One maximum and one sum forward, one sum backward; values and gradients to 1e-6 of float64 in one process."""
    for rank, results in enumerate(outcome(world)):
        assert results[case] is None, f"rank {rank}: {results[case]}"
