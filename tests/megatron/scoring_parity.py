"""Support scores of a model split over ranks, against full logits in one process and the definition."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from tests.megatron import recorded, tiny_gpt
from tests.megatron.tiny_gpt import PARALLEL_SIZES, VOCAB
from trl_support_replay.megatron import (
    MegatronRouterReplay,
    MicroBatch,
    SequenceShard,
    Tokens,
    policy_loss,
    score_vocab_parallel_logits,
    scorer,
    split_scores,
    support_forward,
)
from trl_support_replay.traces.columns import Trace

OUTPUTS = ("logprobs", "support_entropy", "full_logprobs", "full_entropy", "log_mass")
TEMPERATURE, WIDTH, MICRO_BATCHES = 0.7, 32, 2


def traces(micro_batch: int) -> list[Trace]:
    return [
        recorded.random_trace(10 * micro_batch + i, vocab=VOCAB, num_layers=2, synthetic_eos=i == 1, longest=14)
        for i in range(2)
    ]


def micro_batches(packed: bool) -> list[MicroBatch]:
    width = 2 * WIDTH if packed else WIDTH
    return [
        MicroBatch.from_traces(traces(i), multiple=8, width=width, packed=packed, vocab_size=VOCAB)
        for i in range(MICRO_BATCHES)
    ]


def advantages(batch: MicroBatch) -> torch.Tensor:
    """`[B, S]`."""
    return torch.linspace(-1, 1, batch.tokens.input_ids.numel()).view(batch.tokens.input_ids.shape)


def scores_by_definition(logits: torch.Tensor, tokens: Tokens) -> dict[str, torch.Tensor]:
    """`[B, S, V]` logits to scores, each `[B, S]`, token by token."""
    batch_size, width = tokens.input_ids.shape
    logps = torch.log_softmax(logits.double() / TEMPERATURE, dim=-1)
    scores = {name: [] for name in OUTPUTS}
    for row in range(batch_size):
        for position in range(width):
            full = logps[row, position]
            support = tokens.support[row * width + position].tolist() or list(range(full.shape[0]))
            mass = full[support].logsumexp(0)
            inside = full[support] - mass
            target = full[tokens.target_ids[row, position]]
            in_loss = tokens.loss_mask[row, position]
            for name, value in {
                "logprobs": target - mass,
                "support_entropy": -(inside.exp() * inside).sum(),
                "full_logprobs": target,
                "full_entropy": -(full.exp() * full).sum(),
                "log_mass": mass,
            }.items():
                scores[name].append(torch.where(in_loss, value, 0))
    return {name: torch.stack(values).view(batch_size, width) for name, values in scores.items()}


@dataclass
class Scored:
    """One run.

    Attributes:
        scores: of each micro-batch, `[n, B, S]` in order of the outputs; empty off the last stage.
        hidden_grads: of each micro-batch, of the output layer's input `[s, b, H]`.
        grads: by global parameter name.
        num_scored: loss-bearing tokens.
        collectives: all-reduces of a micro-batch's scoring, forward, by operation.
    """

    scores: list[torch.Tensor]
    hidden_grads: list[torch.Tensor]
    grads: dict[str, torch.Tensor]
    num_scored: int
    collectives: list[str]


def run(settings: dict[str, Any], how: str, outputs: Sequence[str], *, tied: bool, packed: bool) -> Scored:
    """A policy-gradient step.

    Args:
        settings: of the model and its split.
        how: "definition", "head" (`support_forward`) or "logits" (`score_vocab_parallel_logits`).
        outputs: what is scored.
    """
    sizes = {name: settings.get(name, default) for name, default in PARALLEL_SIZES.items()}
    tiny_gpt.initialize_parallel(**sizes)
    cfg = tiny_gpt.config(**settings)
    cfg.finalize_model_grads_func = finalize_model_grads
    (chunk,) = tiny_gpt.build_chunks(cfg, tied=tied, packed=packed)
    model = DistributedDataParallel(cfg, DistributedDataParallelConfig(), chunk)
    result = Scored([], [], {}, 0, [])
    if chunk.post_process:
        _keep_hidden_grads(chunk.output_layer, result)
    context, tensor = parallel_state.get_context_parallel_group(), parallel_state.get_tensor_model_parallel_group()
    shard = SequenceShard.from_groups(context, tensor, cfg.sequence_parallel)
    batches = micro_batches(packed)
    batch_of = iter(batches)

    def forward_step(_: Any, model: Any) -> Any:
        batch = next(batch_of)
        tokens, mask = batch.local(shard), batch.attention_mask()
        packing = {"packed_seq_params": batch.packed_seq_params()} if packed else {}
        if how == "definition":
            logits = model(tokens.input_ids, tokens.position_ids, mask, **packing)
            by_name = scores_by_definition(logits, tokens)
            scores = torch.stack([by_name[name] for name in outputs], dim=-1)
        elif how == "logits":
            logits = model(tokens.input_ids, tokens.position_ids, mask, **packing)
            with count_collectives(result):
                scores = score_vocab_parallel_logits(logits, tokens, tensor, temperature=TEMPERATURE, outputs=outputs)
        else:
            in_place_of_logits = count_collectives(result)(scorer._scores_for_logits)
            with mock.patch.object(scorer, "_scores_for_logits", in_place_of_logits):
                scores = support_forward(model, tokens, mask, temperature=TEMPERATURE, outputs=outputs, **packing)
        local = tiny_gpt.zig_zag(advantages(batch), batch.lengths, context.size(), context.rank())
        policy = policy_loss(tokens, local, batch.num_loss_tokens)

        def loss_function(scores: torch.Tensor) -> Any:
            by_name = split_scores(scores, outputs)
            result.num_scored += int(tokens.loss_mask.sum())
            result.scores.append(torch.stack([getattr(by_name, name).detach() for name in outputs]))
            loss, report = policy(scores)
            for name in outputs[1:]:
                loss = loss + 0.1 * (getattr(by_name, name) * local).sum() / batch.num_loss_tokens
            return loss, report

        return scores, loss_function

    def schedule(step: Any) -> None:
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=None,
            model=model,
            num_microbatches=MICRO_BATCHES,
            seq_length=batches[0].tokens.input_ids.shape[1],
            micro_batch_size=1 if packed else 2,
            forward_only=False,
        )

    if cfg.num_moe_experts:
        replay = MegatronRouterReplay(model)
        with replay.schedule(
            forward_step, lambda i: batches[i].routes, lengths_of=lambda i: batches[i].lengths
        ) as step:
            schedule(step)
    else:
        schedule(forward_step)
    for name, parameter in chunk.named_parameters():
        result.grads[tiny_gpt.global_name(chunk, name)] = parameter.main_grad.clone()
    return result


def _keep_hidden_grads(layer: torch.nn.Module, result: Scored) -> None:
    def keep(module: Any, args: Any) -> None:
        args[0].register_hook(lambda grad: result.hidden_grads.append(grad.clone()))

    layer.register_forward_pre_hook(keep)


@contextlib.contextmanager
def count_collectives(result: Scored) -> Iterator[None]:
    """Note every all-reduce of the block by its operation."""
    found: list[str] = []
    reduce = dist.all_reduce

    def counted_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **kwargs: Any) -> Any:
        found.append("max" if op == dist.ReduceOp.MAX else "sum")
        return reduce(tensor, op=op, **kwargs)

    with mock.patch.object(dist, "all_reduce", counted_reduce):
        yield
    result.collectives = result.collectives or found


@dataclass
class ScoringParity:
    """Largest differences from the definition in one process, on this rank.

    Attributes:
        score: absolute, by output.
        hidden_grad: relative to the largest element.
        grad: of parameters, relative to each one's largest element, and the parameter.
        num_scored: how many scores of loss-bearing tokens were compared.
        collectives: see `Scored`.
    """

    score: dict[str, float]
    hidden_grad: float
    grad: tuple[float, str]
    num_scored: int
    collectives: list[str]


def compare(
    settings: dict[str, Any],
    how: str = "head",
    outputs: Sequence[str] = OUTPUTS,
    tied: bool = False,
    packed: bool = False,
) -> ScoringParity:
    model = {name: settings[name] for name in ("num_moe_experts", "moe_ffn_hidden_size") if name in settings}
    alone = run(model, "definition", outputs, tied=tied, packed=packed)
    split = run(settings, how, outputs, tied=tied, packed=packed)
    context = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    tensor = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    lengths = [batch.lengths for batch in micro_batches(packed)]
    worst = dict.fromkeys(outputs, 0.0)
    worst_hidden = 0.0
    for i, scores in enumerate(split.scores):
        want = tiny_gpt.zig_zag(alone.scores[i], lengths[i], *context)
        for name, difference in zip(outputs, (scores - want).abs().flatten(1).amax(1).tolist(), strict=True):
            worst[name] = max(worst[name], difference)
    for i, grad in enumerate(split.hidden_grads):
        # The schedule scales the loss of a context-parallel rank by their number; the reduction averages over them.
        want = tiny_gpt.zig_zag(alone.hidden_grads[i].permute(1, 2, 0), lengths[i], *context).permute(2, 0, 1)
        want = want * context[0]
        if settings.get("sequence_parallel"):
            want = want.chunk(tensor[0])[tensor[1]]
        worst_hidden = max(worst_hidden, ((grad - want).abs().max() / alone.hidden_grads[i].abs().max()).item())
    worst_grad = (0.0, "")
    for name, grad in split.grads.items():
        whole = alone.grads[name]
        want = whole
        if grad.shape != whole.shape:
            dim = next(d for d in range(grad.dim()) if grad.shape[d] != whole.shape[d])
            size = whole.shape[dim] // grad.shape[dim]
            if "linear_fc1" in name:
                want = torch.cat([half.chunk(size)[tensor[1]] for half in whole.chunk(2)])
            else:
                want = whole.chunk(size, dim)[tensor[1]]
        worst_grad = max(worst_grad, (((grad - want).abs().max() / whole.abs().max()).item(), name))
    return ScoringParity(worst, worst_hidden, worst_grad, split.num_scored, split.collectives)
