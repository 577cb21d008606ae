"""One rank's part of the tests of failures: something fails on rank 1 alone, and every rank ends with its message.

The cases run one after another in the same processes, so each also shows that the one before left no rank in a
collective.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from datasets import Dataset, load_dataset

from tests.tiny_models import character_tokenizer, llama
from tests.trainers.conftest import QUIET
from trl_support_replay import SupportReplayGRPOConfig, SupportReplayGRPOTrainer
from trl_support_replay.engines.transformers_generate import ScoresRecorder
from trl_support_replay.parallel.processes import agreeing, agreeing_around, alone

LENGTH = 6


def raised(run: Any) -> tuple[str, str, float]:
    """Type and message of what `run` raises, and the seconds until it does."""
    start = time.monotonic()
    try:
        run()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


# ------------------------------------------------------------------------------------------------- the context managers


def blocks() -> dict[str, Any]:
    """What each block raises when rank 1 fails in it, and how many collectives it makes when nothing fails."""
    rank, accelerator = dist.get_rank(), Accelerator(cpu=True)

    def fail() -> None:
        if rank == 1:
            raise ValueError("no space left")

    def own_work() -> None:
        with agreeing():
            fail()

    def before_a_gather() -> None:
        with agreeing_around(accelerator):
            alone()(fail)()
            accelerator.gather(accelerator.process_index * _one())

    def between_gathers() -> None:
        with agreeing_around(accelerator):
            accelerator.gather(_one())
            alone()(fail)()
            accelerator.gather(_one())

    def after_the_last_gather() -> None:
        with agreeing_around(accelerator):
            accelerator.gather(_one())
            alone()(fail)()

    def on_both() -> None:
        with agreeing():
            raise ValueError(f"rank {rank}")

    found = {case.__name__: raised(case) for case in (own_work, before_a_gather, between_gathers)}
    found |= {case.__name__: raised(case) for case in (after_the_last_gather, on_both)}
    with agreeing_around(accelerator):
        gathered = accelerator.gather(_one() * (rank + 1)).tolist()
    return found | {"gathered": gathered, "left behind": "gather" in vars(accelerator)}


def _one() -> torch.Tensor:
    return torch.ones(1)


# ---------------------------------------------------------------------------------------------------------- the trainer


def _rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Made-up completions; on rank 1 the support of one token does not hold it."""
    rank = trainer.accelerator.process_index
    ids = [[5 + i, 6, 7] for i in range(len(prompts))]
    supports = [[[token, 9] for token in row] for row in ids]
    if rank == 1:
        supports[1][2] = [9, 10]
    return {
        "prompt_ids": [[4, 5]] * len(prompts),
        "completion_ids": ids,
        "logprobs": [[-1.0] * len(row) for row in ids],
        "support_ids": supports,
    }


def failures(folder: str) -> dict[str, Any]:
    """All cases of failures."""
    return blocks() | trainer_faults(folder)


def trainer_faults(folder: str) -> dict[str, Any]:
    """What training raises when one of its parts fails on rank 1."""
    rank, place = dist.get_rank(), Path(folder)

    def build(name: str, train_dataset: Any = None, rollout_func: Any = None, **settings: Any) -> Any:
        run = {"output_dir": str(place / name), "max_steps": 1, "max_completion_length": LENGTH, "top_p": 0.9}
        args = SupportReplayGRPOConfig(**QUIET | run | {"replay_check": "off"} | settings)
        prompts = Dataset.from_dict({"prompt": [str(i) for i in range(8)]})
        return SupportReplayGRPOTrainer(
            llama(hidden_size=16, num_hidden_layers=1),
            lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
            args,
            train_dataset=prompts if train_dataset is None else train_dataset,
            processing_class=character_tokenizer(),
            rollout_func=rollout_func,
        )

    found: dict[str, Any] = {}

    collect = ScoresRecorder.collect
    if rank == 1:
        ScoresRecorder.collect = _unreadable  # type: ignore[method-assign]
    found["reading what was generated"] = raised(build("a").train)
    ScoresRecorder.collect = collect  # type: ignore[method-assign]

    found["a rollout's supports"] = raised(build("b", rollout_func=_rollout).train)

    trainer = build("c", save_traces=str(place / "full"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    write = trainer._saver._folder.write

    def write_little(*args: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            return write(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    if rank == 1:
        trainer._saver._folder.write = write_little
    found["writing traces"] = raised(trainer.train)

    if rank == 1:
        (place / "mine").touch()
    dist.barrier()
    taken = place / ("mine" if rank == 1 else "theirs")  # a file where the folder should be
    found["the folder of traces"] = raised(lambda: build("d", save_traces=str(taken)))

    found["nothing"] = raised(build("e", save_traces=str(place / "traces")).train)
    dist.barrier()
    cache = str(place / f"cache{rank}")
    traces = load_dataset("parquet", data_files=str(place / "traces/*.parquet"), split="train", cache_dir=cache)
    if rank == 1:
        traces = traces.map(_impossible, features=traces.features).remove_columns("trace_digest")
    found["saved traces"] = raised(lambda: build("f", train_dataset=traces))
    found["shards"] = sorted(path.name for path in (place / "traces").glob("*.parquet"))
    return found


def _unreadable(self: ScoresRecorder, completion_ids: Any) -> Any:
    raise RuntimeError("the scores cannot be read")


def _impossible(row: dict[str, Any]) -> dict[str, Any]:
    return {"sampling_logprobs": np.full(len(row["sampling_logprobs"]), -np.inf, np.float32)}
