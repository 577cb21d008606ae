"""Log-probs of every candidate of every support: for looking at distributions, where training needs but one."""

from __future__ import annotations

import torch

from .candidates import SupportCSR
from .head_from_model import ModelHead
from .lm_head import LMHead
from .pair_projection import project_pairs
from .precision import compute_dtype, full_precision
from .projection import LogitTransform, Projection, check_temperature
from .row_statistics import SegmentStatistics


@torch.no_grad()
def score_candidates(
    hidden: torch.Tensor, head: LMHead | ModelHead, support: SupportCSR, *, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of all candidates, renormalised over their supports; without gradient.

        log pi(v | s, S) = z_v - logsumexp over u in S of z_u

    Args:
        hidden: `[N, H]`, the states that predict the tokens.
        head: the output projection, with the whole vocabulary: an `LMHead`, or what `lm_head_from_model` returns.
        support: `N` rows of candidate ids.
        temperature: the sampler's softmax temperature.

    Returns:
        `[nnz]`, in the order of `support.token_ids`; 0 for a candidate that is alone.

    Raises:
        ValueError: shapes that disagree, a temperature that is not above 0, a head that is a shard of the vocabulary, a
            candidate beyond the head, or one twice in a row.
    """
    if hidden.dim() != 2 or len(support) != len(hidden):
        raise ValueError(f"hidden of shape {tuple(hidden.shape)} for {len(support)} supports.")
    check_temperature(temperature)
    if isinstance(head, ModelHead):
        (result,) = head.call(
            hidden, lambda states, found: (_score(states, found, support.to(states.device), temperature),)
        )
        return result
    return _score(hidden, head, support, temperature)


def _score(hidden: torch.Tensor, head: LMHead, support: SupportCSR, temperature: float) -> torch.Tensor:
    if head.group is not None:
        raise ValueError("score_candidates needs the whole vocabulary in one head, not a shard of it.")
    support.check_range(head.weight.shape[0])
    plan = support.plan(0, head.weight.shape[0], "union")
    low_rank, lora_b = None, None
    with full_precision(hidden.device):
        if head.lora is not None:
            dtype = compute_dtype(hidden, head.weight)
            low_rank = hidden.to(dtype) @ head.lora.a.to(dtype).T * head.lora.scaling
            lora_b = head.lora.b
        inputs = Projection(hidden, head.weight, head.bias, low_rank, lora_b)
        logits = LogitTransform(head.logit_scale, head.softcap, temperature)(project_pairs(inputs, plan))
        logits = plan.shifted(logits, temperature)
        maximum, sum_exp, *_ = SegmentStatistics.apply(logits, plan.pair_rows, plan.row_offsets, None)
        logprobs = logits - (maximum + sum_exp.log())[plan.pair_rows]
    result = logprobs.new_zeros(len(support.token_ids))
    result[torch.from_numpy(support.places_of(plan, 0)).to(result.device)] = logprobs
    return result
