"""Run functions on several gloo processes. Pairs of processes are kept and run the next function, too."""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from typing import Any

import torch.multiprocessing as mp

_kept: dict[str | None, _Ranks] = {}  # pairs, by what stands around their calls


def run_on_ranks(
    world_size: int, function: str, *args: Any, timeout: float = 500, within: str | None = None
) -> list[Any]:
    """Results of `function(*args)` on each rank.

    The processes that ran other functions before run this one: what it changes for good it has to put back, but for
    Accelerate's state, which each function finds as new.

    Args:
        world_size: number of processes.
        function: "module:name", imported in the processes.
        timeout: seconds until all is given up.
        within: "module:name" of a context manager around the calls.

    Raises:
        AssertionError: with the traceback of the first rank that failed, or at the timeout.
    """
    ranks = _kept.pop(within, None) if world_size == 2 else None
    ranks = ranks or _Ranks(world_size, within)
    try:
        results = ranks.run(function, args, timeout)
    except BaseException:
        ranks.stop()
        raise
    if world_size == 2:
        _kept[within] = ranks
    else:
        ranks.stop()
    return results


class _Ranks:
    """Processes in a group, each of which waits for functions to run."""

    def __init__(self, world_size: int, within: str | None) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._jobs: list[Any] = [context.SimpleQueue() for _ in range(world_size)]
        self._results: Any = context.Queue()
        self._processes = [
            context.Process(target=_serve, args=(rank, world_size, store, within, jobs, self._results), daemon=True)
            for rank, jobs in enumerate(self._jobs)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: str, args: tuple[Any, ...], timeout: float) -> list[Any]:
        for jobs in self._jobs:
            jobs.put((function, args))
        collected: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(collected) < len(self._processes):
            # Before looking for results: what a process says before it dies is in the queue then.
            dead = [i for i, process in enumerate(self._processes) if process.exitcode is not None]
            try:
                rank, result, error = self._results.get(timeout=1)
            except queue.Empty:
                assert not dead, f"ranks {dead} died without a result"
                assert time.monotonic() < deadline, "the ranks took too long"
                continue
            assert error is None, f"rank {rank} of {len(self._processes)}: {error}"
            collected[rank] = result
        return [collected[rank] for rank in range(len(self._processes))]

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(10)
        self._folder.cleanup()


def _imported(name: str) -> Any:
    module, attribute = name.split(":")
    return getattr(importlib.import_module(module), attribute)


def _serve(rank: int, world_size: int, store: str, within: str | None, jobs: Any, results: Any) -> None:
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
            "DS_ACCELERATOR": "cpu",
        }
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        with _imported(within)() if within else contextlib.nullcontext():
            while True:
                function, args = jobs.get()
                torch.manual_seed(0)
                result = _imported(function)(*args)
                if state := sys.modules.get("accelerate.state"):
                    state.AcceleratorState._reset_state(reset_partial_state=True)
                    state.GradientState._reset_state()
                dist.barrier()
                results.put((rank, result, None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise
