"""One rank's part of the tests of metrics: ranks with different numbers of tokens, or with the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import trl.trainer.grpo_trainer as trl_grpo
from accelerate import Accelerator

from tests.parallel.fault_cases import raised
from trl_support_replay.checks.replay_metrics import over_processes, route_metrics, support_metrics
from trl_support_replay.parallel.tensor_parallel import SampleGroups
from trl_support_replay.routing import RouteMetrics
from trl_support_replay.traces.columns import Trace
from trl_support_replay.traces.support import SupportRows


def everything() -> dict[str, Any]:
    """All cases."""
    return metrics() | {"split": split_policy()}


def metrics() -> dict[str, Any]:
    """Metrics of two ranks with unequal numbers of tokens."""
    rank = dist.get_rank()
    groups, halves = (SampleGroups(Accelerator(cpu=True), size) for size in (1, 2))

    def reduced(local: Any, among: SampleGroups = groups) -> dict[str, float]:
        return {name: metric.value for name, metric in over_processes(local, among.gather_row).items()}

    def samples(sizes: list[int]) -> list[Any]:
        rows = SupportRows.from_ragged([list(range(size)) for size in sizes])
        ids = np.zeros(len(sizes), np.int32)
        return [Trace(ids[:1], ids, np.ones(len(sizes), bool), ids.astype(np.float32), rows)]

    # 990 of 1000 experts on one rank, and 5 of 10 on the other.
    routed = RouteMetrics((3, 4), 5, ((500, 490), (2, 3))[rank], (7, 1)[rank], (100, 1)[rank], (0, 3)[rank])
    empty = RouteMetrics((3, 4), 5, ((500, 490), (0, 0))[rank], (7, 0)[rank], (100, 0)[rank], (0, 9)[rank])
    nothing = RouteMetrics((3,), 2, (0,), 0, 0, 4)
    return {
        "routes": reduced(route_metrics(routed)),
        "one rank captured nothing": reduced(route_metrics(empty)),
        "no rank captured anything": reduced(route_metrics(nothing)),
        "supports": reduced(support_metrics(samples([[1, 4, 4, 3], [8]][rank]), 2, rank)),
        "no token on one rank": reduced(support_metrics(samples([[1, 4], [0]][rank]), 0, 1)),
        "one policy": reduced(support_metrics(samples([1, 4]), 3, 1), halves),
        "gathered": groups.gather_row([2**24 + 1 + rank, 0.1]).tolist(),
    }


def split_policy() -> dict[str, Any]:
    """What is put right for two processes with the parts of one policy."""

    rank, accelerator = dist.get_rank(), Accelerator(cpu=True)
    groups = SampleGroups(accelerator, 2)

    def sample(token: int) -> Any:
        ids = np.array([4, token], np.int32)
        return Trace(ids, ids, np.ones(2, bool), np.zeros(2, np.float32), SupportRows.from_ragged([[4], [token]]))

    rewards = accelerator.gather(torch.arange(3.0)[:, None] + 10 * rank)
    with groups.counted_once(trl_grpo):
        std = trl_grpo.nanstd(groups.share_rewards(rewards)[:, 0])
    return {
        "same": raised(lambda: groups.check_same([sample(5)])),
        "differ": raised(lambda: groups.check_same([sample(5 + rank)])),
        "rewards": groups.share_rewards(rewards)[:, 0].tolist(),
        "std": std.item(),
        "first": groups.first,
    }
