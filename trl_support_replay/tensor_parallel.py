"""A policy that Hugging Face's tensor parallelism splits over several processes: they train on the same samples."""

from __future__ import annotations

from typing import Any

from transformers import set_seed


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


def seed_alike(model: Any, args: Any, process_index: int) -> None:
    """Give the processes that hold the parts of one policy the same random numbers.

    TRL seeds every process by itself. Here the processes of a group have to draw and to shuffle the same samples.
    """
    size = tensor_parallel_size(model)
    if size > 1:
        set_seed(args.seed + process_index // size)
