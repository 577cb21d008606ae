"""Run a function on several gloo processes."""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import tempfile
import time
import traceback
from datetime import timedelta
from typing import Any

import torch.multiprocessing as mp


def run_on_ranks(
    world_size: int, function: str, *args: Any, timeout: float = 500, within: str | None = None
) -> list[Any]:
    """Results of `function(*args)` on each rank.

    Args:
        world_size: number of processes.
        function: "module:name", imported in the processes.
        timeout: seconds until all is given up.
        within: "module:name" of a context manager around the call.

    Raises:
        AssertionError: with the traceback of the first rank that failed, or at the timeout.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results: Any = context.Queue()
        store = os.path.join(folder, "store")
        processes = [
            context.Process(target=_run, args=(rank, world_size, store, function, args, within, results), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        collected: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        try:
            while len(collected) < world_size:
                rank, result, error = _next(results, processes, deadline)
                assert error is None, f"rank {rank} of {world_size}: {error}"
                collected[rank] = result
        finally:
            for process in processes:
                if len(collected) == world_size:
                    process.join(10)
                if process.is_alive():
                    process.terminate()
                process.join(10)
    return [collected[rank] for rank in range(world_size)]


def _imported(name: str) -> Any:
    module, attribute = name.split(":")
    return getattr(importlib.import_module(module), attribute)


def _next(results: Any, processes: list[Any], deadline: float) -> tuple[int, Any, str | None]:
    while True:
        try:
            return results.get(timeout=1)
        except queue.Empty:
            dead = [i for i, process in enumerate(processes) if process.exitcode not in (None, 0)]
            assert not dead, f"ranks {dead} died without a result"
            assert time.monotonic() < deadline, "the ranks took too long"


def _run(
    rank: int,
    world_size: int,
    store: str,
    function: str,
    args: tuple[Any, ...],
    within: str | None,
    results: Any,
) -> None:
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        # Libraries that join a running group look here first.
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
        }
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        with _imported(within)() if within else contextlib.nullcontext():
            result = _imported(function)(*args)
        dist.barrier()
        dist.destroy_process_group()
        results.put((rank, result, None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise
