"""Trainer callbacks that keep what a run has done so far."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback


class MetricsFile(TrainerCallback):
    """Appends every logged metric to `<output_dir>/metrics.jsonl`, one line a logging step, as it comes.

    A resumed run continues the file from its checkpoint's step; a new run moves an older file out of the way.
    """

    def __init__(self) -> None:
        self.path: Path | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self.path = Path(args.output_dir) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return
        if state.global_step == 0:
            number = 1
            while (older := self.path.with_name(f"metrics.{number}.jsonl")).exists():
                number += 1
            self.path.rename(older)
            return
        lines = self.path.read_text().splitlines(keepends=True)
        # An interruption may have cut the last line.
        kept = [x for x in lines if x.endswith("\n") and json.loads(x)["step"] <= state.global_step]
        self.path.write_text("".join(kept))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.path is None or not logs:
            return
        with open(self.path, "a") as file:
            file.write(json.dumps({"step": state.global_step, "time": time.time(), **logs}) + "\n")


class StopOnInterrupt(TrainerCallback):
    """Turns Ctrl-C into a checkpoint and a clean end: a context manager around `trainer.train()`.

    The step under way is finished, its checkpoint is written, and training stops; every process of a run stops at the
    same step. A second Ctrl-C raises `KeyboardInterrupt` at once. Outside the main thread nothing is changed.

    Attributes:
        requested: whether training was asked to stop.
        checkpoint: the folder of the checkpoint written for it; `None` when there was no interruption.
    """

    # A launcher passes a terminal's Ctrl-C on to workers that the terminal has told already.
    _ECHO_SECONDS = 2.0

    def __init__(self) -> None:
        self.requested = False
        self.checkpoint: Path | None = None
        self._asked_at = 0.0
        self._previous: Any = None

    def __enter__(self) -> StopOnInterrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, signum: int, frame: Any) -> None:
        now = time.monotonic()
        if self.requested and now - self._asked_at > self._ECHO_SECONDS:
            raise KeyboardInterrupt
        if not self.requested:
            self.requested, self._asked_at = True, now

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.distributed.is_initialized():
            anyone = torch.tensor([float(self.requested)], device=args.device)
            torch.distributed.all_reduce(anyone, op=torch.distributed.ReduceOp.MAX)
            self.requested = bool(anyone.item())
        if self.requested:
            control.should_save = True
            control.should_training_stop = True
            self.checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
