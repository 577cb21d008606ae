"""Loss functions for Megatron's `forward_step`, over the scores of `support_forward`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .micro_batch import Tokens

LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def policy_loss(
    tokens: Tokens,
    advantages: torch.Tensor,
    num_loss_tokens: int,
    *,
    old_logprobs: torch.Tensor | None = None,
    ref_logprobs: torch.Tensor | None = None,
    epsilon: float = 0.2,
    beta: float = 0.0,
) -> LossFunction:
    """The clipped policy gradient loss, averaged over the loss-bearing tokens of a micro-batch.

    With ratio r = exp(logp - old) of log-probs over the support, per token

        -min(r A, clip(r, 1 - epsilon, 1 + epsilon) A) + beta (exp(ref - logp) - (ref - logp) - 1)

    Under context parallelism each rank adds up its own tokens and divides by the number of the whole micro-batch, which
    is what Megatron's schedule and gradient reduction expect of a two-tuple loss while `calculate_per_token_loss` is
    False; [`support_forward`] refuses True.

    Args:
        tokens: this rank's.
        advantages: `[B, S]` of this rank's tokens, or `[B, 1]`.
        num_loss_tokens: of the whole micro-batch, before it was split: `MicroBatch.num_loss_tokens`.
        old_logprobs: `[B, S]`, from [`collect_scores`] before the update. Default: what the engine recorded. A token
            that nobody sampled has no recorded log-prob; its ratio is 1 then.
        ref_logprobs: `[B, S]` of the reference policy, over the same supports; needed when `beta` is not 0.
        epsilon, beta: as in the formula.

    Returns:
        A function of the scores `[B, S, 1]`, log-probs in the first column, for the schedule: it gives the loss and
        `{"sums": [5]}`, float64 sums over this rank's tokens of loss, ratio, clipped tokens, KL and tokens; see
        [`mean_metrics`].

    Raises:
        ValueError: `beta` without `ref_logprobs`.
    """
    if beta and ref_logprobs is None:
        raise ValueError(f"beta={beta} needs ref_logprobs.")
    mask = tokens.loss_mask
    old = tokens.recorded_logprobs if old_logprobs is None else old_logprobs

    def loss(scores: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logprobs = scores[..., 0]
        # Not sampled, so not recorded: NaN. Masked before the exponential, so that no gradient is NaN.
        log_ratio = torch.where(mask & ~old.isnan(), logprobs - old.nan_to_num(), logprobs - logprobs.detach())
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
        losses = -torch.minimum(ratio * advantages, clipped * advantages)
        kl = torch.zeros_like(losses)
        if ref_logprobs is not None:
            gap = torch.where(mask, ref_logprobs - logprobs, 0)
            kl = gap.exp() - gap - 1
            losses = losses + beta * kl
        is_clipped = (ratio * advantages > clipped * advantages) & mask
        with torch.no_grad():
            each = (losses, ratio, is_clipped.float(), kl, torch.ones_like(losses))
            # In float64: float32 rounds counts above 2^24.
            sums = torch.stack([torch.where(mask, x, 0).sum(dtype=torch.float64) for x in each])
        return torch.where(mask, losses, 0).sum() / max(num_loss_tokens, 1), {"sums": sums}

    return loss


METRICS = ("loss", "ratio", "clipped_fraction", "kl")


def mean_metrics(
    reports: list[dict[str, torch.Tensor]], group: torch.distributed.ProcessGroup | None = None
) -> dict[str, float]:
    """Means per loss-bearing token over the micro-batches of a step.

    Args:
        reports: what the forward-backward function returned on the last pipeline stage.
        group: ranks that hold different tokens: the data-parallel group with context parallelism.
    """
    sums = torch.stack([report["sums"] for report in reports]).sum(0)
    if group is not None:
        torch.distributed.all_reduce(sums, group=group)
    *totals, count = sums.tolist()
    return {name: total / max(count, 1) for name, total in zip(METRICS, totals, strict=True)}


def collect_scores(scores: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
    """A loss function for passes without gradient: old, recomputed and reference log-probs.

    Call the forward-backward function with `forward_only=True, collect_non_loss_data=True` under `torch.no_grad()`; it
    returns the scores `[B, S, n]` of each micro-batch on the last pipeline stage. (`non_loss_data` is how the schedule
    says so.)

    Raises:
        ValueError: the schedule wants a loss.
    """
    if not non_loss_data:
        raise ValueError("collect_scores gives no loss: pass collect_non_loss_data=True to the schedule.")
    return scores.detach()
