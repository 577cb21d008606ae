"""Policy-gradient steps on saved traces with megatron-core: supports and routed experts replayed.

    python recipes/megatron/make_traces.py --folder runs/megatron
    torchrun --nproc-per-node 8 recipes/megatron/train.py --folder runs/megatron --tensor 2 --pipeline 2 --expert 2

The split may be any that divides the model (4 layers, 4 heads, 8 experts, 256 ids) and the traces. Before the first
step, the traces' log-probs are computed again: with the weights that sampled them, the gap has to be rounding.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import tiny_moe
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from trl_support_replay.megatron import (
    MegatronRouterReplay,
    MicroBatch,
    SequenceShard,
    collect_scores,
    mean_metrics,
    policy_loss,
    support_forward,
)
from trl_support_replay.traces.columns import Trace, table_to_traces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/megatron"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=1.0, help="what the traces were sampled with")
    tiny_moe.add_split_arguments(parser)
    args = parser.parse_args()

    device = tiny_moe.initialize(args)
    config = tiny_moe.build_config(args)
    config.finalize_model_grads_func = finalize_model_grads
    chunks = tiny_moe.build_chunks(config, device)
    tiny_moe.load(chunks, args.folder / "checkpoint")
    model = [DistributedDataParallel(config, DistributedDataParallelConfig(), chunk) for chunk in chunks]
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=args.lr, weight_decay=0.0), model)

    shard = SequenceShard.from_groups(
        parallel_state.get_context_parallel_group(),
        parallel_state.get_tensor_model_parallel_group(),
        config.sequence_parallel,
    )
    traces, advantages = load_traces(args.folder / "traces")
    batches = micro_batches(traces, args.micro_batch_size, shard.multiple)
    advantage_rows = torch.tensor(advantages, device=device)[:, None].split(args.micro_batch_size)
    loop = Loop(model, batches, shard, args.temperature, device)
    report = print if is_reporting_rank() else (lambda *_: None)

    scores = loop.run(lambda i: collect_scores, forward_only=True)
    report(f"log-prob gap before the first step: {log_prob_gap(scores, loop.tokens):.1e}")
    for step in range(args.steps):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = loop.run(lambda i: policy_loss(loop.tokens[i], advantage_rows[i], batches[i].num_loss_tokens))
        _, grad_norm, _ = optimizer.step()
        if reports:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            metrics = "  ".join(f"{name} {value:.4f}" for name, value in mean_metrics(reports, group).items())
            report(f"step {step}  {metrics}  grad_norm {grad_norm:.4f}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class Loop:
    """Passes over the micro-batches of this data-parallel rank.

    Attributes:
        tokens: of each micro-batch, this context-parallel rank's, on the device.
    """

    def __init__(
        self,
        model: list[DistributedDataParallel],
        batches: list[MicroBatch],
        shard: SequenceShard,
        temperature: float,
        device: torch.device,
    ) -> None:
        self.model, self.batches, self.temperature = model, batches, temperature
        self.tokens = [batch.local(shard).to(device) for batch in batches]
        self.masks = [batch.attention_mask().to(device) for batch in batches]
        self.replay = MegatronRouterReplay(model)

    def forward_step(self, indices: Iterator[int], model: DistributedDataParallel) -> tuple[torch.Tensor, Any]:
        i = next(indices)
        scores = support_forward(model, self.tokens[i], self.masks[i], temperature=self.temperature)
        return scores, self.loss_of(i)

    def run(self, loss_of: Callable[[int], Any], forward_only: bool = False) -> list[Any]:
        """What the loss function of each micro-batch reported; nothing but on the last pipeline stage."""
        self.loss_of = loss_of
        batch_size, width = self.batches[0].tokens.input_ids.shape
        iterators = [iter(range(len(self.batches))) for _ in self.model]
        routes = [batch.routes for batch in self.batches]
        with (
            self.replay.schedule(self.forward_step, routes.__getitem__, forward_only) as step,
            torch.set_grad_enabled(not forward_only),
        ):
            return get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iterators if len(self.model) > 1 else iterators[0],
                model=self.model if len(self.model) > 1 else self.model[0],
                num_microbatches=len(self.batches),
                seq_length=width,
                micro_batch_size=batch_size,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )


def load_traces(folder: Path) -> tuple[list[Trace], list[float]]:
    """The traces of this data-parallel rank, and the advantage of each: its reward less the mean of its prompt's."""
    dataset = datasets.load_dataset("parquet", data_files=f"{folder}/*.parquet", split="train")
    traces = table_to_traces(dataset.with_format("arrow")[:])
    rewards: dict[bytes, list[float]] = {}
    for trace in traces:
        rewards.setdefault(trace.prompt_ids.tobytes(), []).append(trace.extra["reward"])
    advantages = [trace.extra["reward"] - float(np.mean(rewards[trace.prompt_ids.tobytes()])) for trace in traces]
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    return traces[rank::size], advantages[rank::size]


def micro_batches(traces: list[Trace], size: int, multiple: int) -> list[MicroBatch]:
    """Micro-batches of one width."""
    if len(traces) % size:
        raise SystemExit(f"{len(traces)} traces on each data-parallel rank do not make micro-batches of {size}.")
    longest = max(len(trace.prompt_ids) + len(trace.completion_ids) for trace in traces)
    return [
        MicroBatch.from_traces(
            traces[start : start + size],
            multiple=multiple,
            width=-(-longest // multiple) * multiple,
            pad_token_id=tiny_moe.PAD,
            vocab_size=tiny_moe.VOCAB,
        )
        for start in range(0, len(traces), size)
    ]


def log_prob_gap(scores: list[torch.Tensor], tokens: list[Any]) -> float:
    """Largest difference between recorded log-probs and `scores`, over this rank's tokens on the last stage."""
    gaps = [0.0]
    for values, each in zip(scores, tokens, strict=False):
        recorded = each.loss_mask & ~each.recorded_logprobs.isnan()
        gaps.append((values[..., 0] - each.recorded_logprobs)[recorded].abs().max().item())
    return max(gaps)


def is_reporting_rank() -> bool:
    """One rank among those that hold losses."""
    return parallel_state.is_pipeline_last_stage(ignore_virtual=True) and all(
        rank == 0
        for rank in (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(with_context_parallel=True),
        )
    )


if __name__ == "__main__":
    main()
