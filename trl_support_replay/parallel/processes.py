"""Raises an error of one process on all processes of a run.

If one process raised alone, the others would wait at the next collective until a time-out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather, gather_object

_ALONE = "_of_one_process"


class OtherProcessError(RuntimeError):
    """Another process failed, so this one stops too; the message has its number and its error."""


@contextlib.contextmanager
def agreeing() -> Iterator[None]:
    """Wraps work that each process does by itself: if it fails on one process, the block raises on all.

    Every process has to enter the block, and no collective may run inside it. At its end the processes exchange one
    flag, and the messages if there are any. A single process exchanges nothing.

    Raises:
        OtherProcessError: here, when the work failed on other processes only. A process whose own work failed raises
            its own error.
    """
    try:
        yield
    except Exception as error:
        _exchange(error)
        raise
    _exchange(None)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Wraps work inside a block of `agreeing_around`, also as a decorator: all processes learn of its failure.

    No collective may run inside, nor between here and the accelerator's next gather on the other processes.
    """
    try:
        yield
    except Exception as error:
        setattr(error, _ALONE, True)
        raise


@contextlib.contextmanager
def agreeing_around(accelerator: Any) -> Iterator[None]:
    """Wraps code of a library that works and gathers in turn: failures before a gather raise on all processes.

    The processes exchange their flags before each `accelerator.gather` and at the end. Only failures marked by `alone`
    take part. Any other error may come from a collective that the other processes are still in: it is raised here at
    once, as it would be without this block.

    Raises:
        OtherProcessError: as `agreeing`.
    """
    if _num_processes() == 1:
        yield
        return

    def gather_when_all_are_well(*args: Any, **kwargs: Any) -> Any:
        _exchange(None)
        return type(accelerator).gather(accelerator, *args, **kwargs)

    accelerator.gather = gather_when_all_are_well
    try:
        yield
    except Exception as error:
        if getattr(error, _ALONE, False):
            _exchange(error)
        raise
    finally:
        del accelerator.gather
    _exchange(None)


def _num_processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _exchange(error: Exception | None) -> None:
    if _num_processes() == 1:
        return
    state = PartialState()
    failed = gather(torch.tensor([int(error is not None)], device=state.device)).tolist()
    if not any(failed):
        return
    texts = gather_object([None if error is None else f"{type(error).__name__}: {error}"])
    if error is None:
        raise OtherProcessError("\n".join(f"process {rank}: {text}" for rank, text in enumerate(texts) if text))
