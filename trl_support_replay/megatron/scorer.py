"""Support scores from a Megatron model's hidden states and its vocabulary-parallel output layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..scoring import LMHead, SupportCSR, SupportScores, VocabShard, score_support, score_support_from_logits
from .core import ColumnParallelLinear, gather_from_sequence_parallel_region
from .micro_batch import Tokens
from .routers import unwrap


def support_forward(
    model: nn.Module,
    tokens: Tokens,
    attention_mask: torch.Tensor | None = None,
    *,
    temperature: float = 1.0,
    outputs: Sequence[str] = ("logprobs",),
    **model_arguments: Any,
) -> torch.Tensor:
    """Run a model chunk; on the last pipeline stage, score the targets over their supports instead of making logits.

    Goes into a `forward_step` where `model(...)` stood. The scores are computed in the place of the output layer,
    inside the model's forward, so that wrappers and hooks of the layer and its weight see an ordinary call.

    - Tensor parallelism: each rank projects the candidates of its own part of the vocabulary; one maximum and one sum
      over the group join them.
    - Sequence parallelism: hidden states are gathered before, and their gradient is summed and scattered by that.
    - Context parallelism: `tokens` are this rank's; ranks without targets take part.
    - Tied embeddings: the shared weight is used in place.

    Args:
        model: the chunk that the schedule hands to the forward step.
        tokens: this rank's, on the model's device: [`MicroBatch.local`].
        attention_mask: goes to the model.
        temperature: the sampler's.
        outputs: names among those of `SupportScores`; see [`score_support`].
        model_arguments: go to the model, for example `packed_seq_params`.

    Returns:
        Float32 `[B, S, len(outputs)]` on the last pipeline stage, 0 where the target is not part of the loss (see
        [`split_scores`]); elsewhere the chunk's hidden states. A target that nobody sampled is scored over the whole
        vocabulary.

    Raises:
        ValueError: an output layer or a setting that cannot be scored exactly; with gradient, a setting by which
            [`policy_loss`] would be scaled wrongly; tokens that do not fit the hidden states; and as [`score_support`].
    """
    inner: Any = unwrap(model)
    inputs = (tokens.input_ids, tokens.position_ids, attention_mask)
    if not inner.post_process:
        return model(*inputs, **model_arguments)
    layer = inner.output_layer
    _check_scorable(layer, inner.config)
    layer.forward = partial(_scores_for_logits, layer, tokens, temperature, tuple(outputs))
    try:
        return model(*inputs, **model_arguments)
    finally:
        del layer.forward


def score_vocab_parallel_logits(
    logits: torch.Tensor,
    tokens: Tokens,
    group: torch.distributed.ProcessGroup,
    *,
    temperature: float = 1.0,
    outputs: Sequence[str] = ("logprobs",),
) -> torch.Tensor:
    """Scores of [`support_forward`], from logits that a model has made.

    Args:
        logits: `[B, S, V / T]`, as the last pipeline stage returns them without labels: this rank's part of the
            vocabulary, not gathered.
        tokens: this rank's.
        group: the tensor-parallel group.
        temperature, outputs: as in [`support_forward`].

    Returns:
        Float32 `[B, S, len(outputs)]`.

    Raises:
        ValueError: logits of other rows or positions than the tokens; and as [`score_support`].
    """
    if logits.shape[:2] != tokens.input_ids.shape:
        raise ValueError(f"Logits of shape {tuple(logits.shape)} for tokens of {tuple(tokens.input_ids.shape)}.")
    rows = _scored_rows(tokens)
    scores = score_support_from_logits(
        logits.flatten(0, 1)[rows.to(logits.device)],
        *_targets(tokens, rows, logits.device),
        shard=_vocab_shard(logits.shape[2], group, reduce_hidden_grad=False),
        temperature=temperature,
        outputs=outputs,
        empty_rows="full",
    )
    return _spread(scores, outputs, rows, tokens.input_ids.numel()).view(*tokens.input_ids.shape, len(outputs))


def split_scores(scores: torch.Tensor, outputs: Sequence[str] = ("logprobs",)) -> SupportScores:
    """What [`support_forward`] returned, by name, each `[B, S]`.

    Args:
        scores: `[B, S, len(outputs)]`.
        outputs: the names that the scores were asked for by, in that order.

    Raises:
        ValueError: another number of names than of columns.
    """
    if scores.shape[-1] != len(outputs):
        raise ValueError(f"Scores of shape {tuple(scores.shape)} do not hold the {len(outputs)} outputs {outputs}.")
    return SupportScores(**dict(zip(outputs, scores.unbind(-1), strict=True)))


def _check_scorable(layer: nn.Module, config: Any) -> None:
    if not isinstance(layer, ColumnParallelLinear):
        raise ValueError(
            f"The output layer is a {type(layer).__name__}; supports are scored over a ColumnParallelLinear. Score the "
            "logits with score_vocab_parallel_logits."
        )
    # Both change what comes out of, or goes into, the layer without going through its forward.
    for setting in ("use_mup", "defer_embedding_wgrad_compute"):
        if getattr(config, setting, False):
            raise ValueError(
                f"Supports cannot be scored in the output layer with {setting}=True. Set it to False, or score the "
                "logits with score_vocab_parallel_logits."
            )
    # The schedule then leaves it to the loss function to count tokens, and gradients are summed over data and context
    # parallel ranks instead of averaged: those of a two-tuple loss come out too large by the number of these ranks.
    if torch.is_grad_enabled() and config.calculate_per_token_loss:
        raise ValueError(
            "calculate_per_token_loss=True: Megatron then divides gradients by a number of tokens that policy_loss "
            "does not report, since it has divided by its own already. Set calculate_per_token_loss=False."
        )


def _scores_for_logits(
    layer: Any,
    tokens: Tokens,
    temperature: float,
    outputs: tuple[str, ...],
    hidden: torch.Tensor,
    weight: torch.Tensor | None = None,
    runtime_gather_output: bool | None = None,
) -> tuple[torch.Tensor, None]:
    """Stands in for `ColumnParallelLinear.forward`.

    Args:
        hidden: `[s, b, H]`; under sequence parallelism `s` is this rank's part.
        weight: of tied embeddings; default the layer's own.
        runtime_gather_output: without meaning for scores, which all ranks hold alike.

    Returns:
        Scores `[s, b, len(outputs)]` of all positions, and no bias.
    """
    if layer.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, group=layer.tp_group)
    width, batch_size, _ = hidden.shape
    if (batch_size, width) != tuple(tokens.input_ids.shape):
        raise ValueError(
            f"Hidden states of {width} positions and {batch_size} rows for tokens of shape "
            f"{tuple(tokens.input_ids.shape)}: the scorer takes the tokens of this context-parallel rank."
        )
    rows = _scored_rows(tokens)
    sequence_first = (rows % width) * batch_size + rows // width
    weight = layer.weight if weight is None else weight
    head = LMHead(
        weight=weight,
        bias=None if layer.skip_bias_add else layer.bias,
        shard=_vocab_shard(len(weight), layer.tp_group, reduce_hidden_grad=not layer.sequence_parallel),
    )
    scores = score_support(
        hidden.flatten(0, 1)[sequence_first.to(hidden.device)],
        head,
        *_targets(tokens, rows, hidden.device),
        temperature=temperature,
        outputs=outputs,
        empty_rows="full",
    )
    return _spread(scores, outputs, sequence_first, width * batch_size).view(width, batch_size, len(outputs)), None


def _scored_rows(tokens: Tokens) -> torch.Tensor:
    """Int64 `[N]` on the host: flat positions, row by row, of the targets that are part of the loss."""
    return tokens.loss_mask.flatten().nonzero().squeeze(1).cpu()


def _targets(tokens: Tokens, rows: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, SupportCSR]:
    support = tokens.support.take(rows.numpy())
    return (
        tokens.target_ids.flatten()[rows.to(tokens.target_ids.device)],
        SupportCSR.from_numpy(support.token_ids, support.offsets, device),
    )


def _vocab_shard(
    num_rows: int, group: torch.distributed.ProcessGroup, *, reduce_hidden_grad: bool
) -> VocabShard | None:
    if group.size() == 1:
        return None
    start = group.rank() * num_rows
    return VocabShard(start, start + num_rows, group, reduce_hidden_grad)


def _spread(scores: SupportScores, outputs: Sequence[str], rows: torch.Tensor, num_positions: int) -> torch.Tensor:
    """`[num_positions, len(outputs)]`, 0 but at `rows`."""
    columns = torch.stack([getattr(scores, name) for name in outputs], dim=1)
    return columns.new_zeros(num_positions, len(outputs)).index_copy(0, rows.to(columns.device), columns)
