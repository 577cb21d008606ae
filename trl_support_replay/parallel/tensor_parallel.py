"""A policy that Hugging Face's tensor parallelism splits over several processes: they train on the same samples."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import set_seed

from ..libraries.rebind import rebound
from ..traces.columns import Trace

logger = logging.getLogger(__name__)


class SamplesDifferError(RuntimeError):
    """Processes that hold the parts of one policy came to different completions."""


def tensor_parallel_size(model: Any) -> int:
    """Number of processes that each hold a part of every layer of `model`; 1 for a model that is not split."""
    return int(getattr(model, "tp_size", None) or 1)


def check_tensor_parallel(model: Any, args: Any) -> None:
    """Refuse what a split policy cannot do.

    Raises:
        ValueError: with vLLM. TRL hands the engine each parameter as this process holds it, which is a part; and a
            server or engine would draw other completions for each process of a group.
    """
    size = tensor_parallel_size(model)
    if size > 1 and args.use_vllm:
        raise ValueError(
            f"use_vllm=True with a policy split by tensor parallelism (tp_size={size}): TRL cannot hand the parts of "
            "its parameters to vLLM. Set use_vllm=False, train on saved traces, or shard the policy by FSDP2 or ZeRO-3."
        )


class SampleGroups:
    """The processes of a trainer, grouped by the samples they train on.

    The processes of a tensor-parallel group hold the parts of one policy and train on the same samples; all other
    processes are a group of their own. As in Accelerate's data loader, a group has consecutive numbers. TRL knows
    nothing of groups and takes every process to have samples of its own; what follows from that is put right here.

    Args:
        accelerator: the trainer's.
        size: processes of a group.

    Attributes:
        first: whether this process is the first of its group, which speaks for it: saves its traces, for example.
        single: whether every process has samples of its own.
    """

    def __init__(self, accelerator: Any, size: int = 1):
        self._accelerator = accelerator
        self._size = size
        self.first = accelerator.process_index % size == 0
        self.single = size == 1

    @classmethod
    def of(cls, trainer: Any) -> SampleGroups:
        """Of a trainer that is built: its processes draw the same random numbers in a group, and its batches are whole.

        Raises:
            ValueError: see `check_tensor_parallel`; or the batches of a process would hold parts of groups of
                `num_generations` completions.
        """
        args, accelerator, size = trainer.args, trainer.accelerator, tensor_parallel_size(trainer.model)
        if size > 1:
            check_tensor_parallel(trainer.model, args)
            _use_whole_batches(args, size, evaluates=trainer.eval_dataset is not None)
            # TRL seeds every process by itself. Those of a group have to draw and to shuffle the same samples.
            set_seed(args.seed + accelerator.process_index // size)
        return cls(accelerator, size)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """`[groups, n]` from the `[1, n]` of every process; a group counts once."""
        return self._accelerator.gather(rows)[:: self._size]

    def gather_row(self, values: Sequence[float]) -> np.ndarray:
        """`[groups, n]` float64 from the `n` numbers of every process; a group counts once."""
        row = np.array([values], dtype=np.float64)
        if self._accelerator.num_processes == 1:
            return row
        # The bits of float64 travel as integers, which every accelerator has. Float32 would round counts above 2^24.
        bits = torch.from_numpy(row.view(np.int64)).to(self._accelerator.device)
        return self.gather(bits).cpu().numpy().view(np.float64)

    def check_same(self, samples: Sequence[Trace]) -> None:
        """Every process calls this with its own samples.

        Raises:
            SamplesDifferError: on all processes, when the samples differ within a group.
        """
        if self._size == 1:
            return
        digest = hashlib.sha256()
        for sample in samples:
            for ids in (sample.prompt_ids, sample.completion_ids):
                digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
        own = torch.from_numpy(np.frombuffer(digest.digest()[:8], np.int64).copy()).to(self._accelerator.device)
        groups = self._accelerator.gather(own).view(-1, self._size)
        differ = (groups != groups[:, :1]).any(dim=1).nonzero().flatten().tolist()
        if differ:
            start = differ[0] * self._size
            raise SamplesDifferError(
                f"Processes {start} to {start + self._size - 1} hold the parts of one policy (tp_size={self._size}), "
                "and their rollouts returned different completions. They have to train on the same ones. Let the "
                "rollout_func sample on the first of them and broadcast what it returns to the others."
            )

    def share_rewards(self, rewards: torch.Tensor) -> torch.Tensor:
        """`[processes * B, n]` rewards of all processes, with those of a group's first process for all of its group.

        A reward function may answer differently each time it is asked, and a group has to train on one answer.
        """
        if self._size == 1:
            return rewards
        by_group = self._by_group(rewards)
        return by_group[:, :1].expand_as(by_group).reshape(rewards.shape)

    def _by_group(self, values: torch.Tensor) -> torch.Tensor:
        """`[groups, processes of a group, ...]` of what TRL gathered from all processes."""
        return values.reshape(-1, self._size, values.numel() // self._accelerator.num_processes)

    @contextlib.contextmanager
    def counted_once(self, trl_module: Any) -> Iterator[None]:
        """While the block runs, TRL's standard deviations over all processes count the samples of a group once.

        It divides by the number of samples less one, which copies of them change.
        """
        nanstd = trl_module.nanstd

        def nanstd_of_groups(tensor: torch.Tensor, dim: Any = None, keepdim: bool = False) -> torch.Tensor:
            if dim is None and not keepdim:
                tensor = self._by_group(tensor)[:, 0]
            return nanstd(tensor, dim=dim, keepdim=keepdim)

        with rebound(trl_module, nanstd=nanstd_of_groups) if self._size > 1 else contextlib.nullcontext():
            yield

    def tokens_once(self, before: int, after: int) -> int:
        """A sum over all processes that rose from `before` to `after`, with each group counted once in the rise."""
        return before + (after - before) // self._size


def _use_whole_batches(args: Any, size: int, evaluates: bool) -> None:
    """Let TRL's sampler hand out as many rows a generation as the groups take.

    TRL multiplies by the number of processes. With a group's processes on the same rows, the sampler would hand out
    more than are taken: a prompt's completions would be spread over several generations, of which each then holds
    copies, and with several steps a generation some rows would never be used and others twice.
    """
    groups = args.world_size // size
    settings = [
        (
            "per_device_train_batch_size * steps_per_generation",
            args.per_device_train_batch_size * args.steps_per_generation,
            "num_generations",
            args.num_generations,
        )
    ]
    if evaluates:
        number = ("num_generations", args.num_generations)
        if args.num_generations_eval:
            number = ("num_generations_eval", args.num_generations_eval)
        settings.append(("per_device_eval_batch_size", args.per_device_eval_batch_size, *number))
    for batch_name, batch, name, number in settings:
        if batch % number:
            raise ValueError(
                f"{batch_name} = {batch} with {name}={number} and a policy split by tensor parallelism "
                f"(tp_size={size}): the {size} processes of a group train on the same completions, so each has to hold "
                f"all {number} completions of a prompt. Set {batch_name} to a multiple of {number}."
            )
    rows = args.per_device_train_batch_size * args.steps_per_generation * groups
    if rows != args.generation_batch_size:
        logger.info(
            "A generation has %d completions instead of %d (generation_batch_size), since the policy is split by "
            "tensor parallelism and the %d processes of a group train on the same ones.",
            rows,
            args.generation_batch_size,
            size,
        )
        args.generation_batch_size = rows
