"""Log-probs of sampled tokens over the sets they were drawn from.

    log pi(a | s, S) = z_a - logsumexp_{v in S} z_v

with `z` the logits after scale, softcap and temperature, and `S` fixed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from .arguments import FULL_OUTPUTS, IMPLEMENTATIONS, check_arguments, choose_kernel, plan_for
from .candidates import SupportCSR
from .collectives import max_over_group, share_with_group, sum_over_group
from .head_from_model import ModelHead
from .head_projection import HeadProjection
from .lm_head import LMHead, VocabShard
from .plan import CandidatePlan
from .precision import compute_dtype, full_precision
from .projection import LogitTransform, Projection
from .reference import dense_projection, full_statistics
from .row_statistics import RowStatistics, SegmentStatistics


@dataclass
class SupportScores:
    """Scores of `N` tokens, each `[N]`, float32 (float64 for float64 inputs), or `None` where not asked for.

    Attributes:
        logprobs: log-prob of the sampled token, renormalised over its support.
        support_entropy: entropy of that distribution, in nats.
        full_logprobs: log-prob of the sampled token over the whole vocabulary.
        full_entropy: entropy over the whole vocabulary, in nats.
        log_mass: log of the whole-vocabulary probability that the support holds.

    Where the supports carry shifts, `logprobs` and `support_entropy` are those of the shifted distribution, which the
    sampler drew from. `full_logprobs` and `full_entropy`, and the log-prob of a token without recorded support, are
    those of the policy without shifts. `log_mass` would compare the two, so it is refused.
    """

    logprobs: torch.Tensor | None = None
    support_entropy: torch.Tensor | None = None
    full_logprobs: torch.Tensor | None = None
    full_entropy: torch.Tensor | None = None
    log_mass: torch.Tensor | None = None


def score_support(
    hidden: torch.Tensor,
    head: LMHead | ModelHead,
    sampled_ids: torch.Tensor,
    support: SupportCSR,
    *,
    temperature: float = 1.0,
    outputs: Sequence[str] = ("logprobs",),
    implementation: str = "auto",
    empty_rows: str = "error",
) -> SupportScores:
    """Score sampled tokens over their supports, from hidden states.

    Only the candidates' logits are computed unless a full-vocabulary output is asked for. Every score is differentiable
    with respect to the hidden states and all parts of the head, once. A token whose support is itself alone has
    log-prob and entropy exactly 0 and costs nothing.

    With a sharded vocabulary, all ranks of the group call this with the same tokens and supports; forward makes one
    maximum and one sum over the group, backward one sum. Ranks that own none of the candidates take part.

    Args:
        hidden: `[N, H]`, the states that predict the sampled tokens.
        head: the output projection: an `LMHead`, or what `lm_head_from_model` returns.
        sampled_ids: `[N]` integers.
        support: `N` rows of candidate ids.
        temperature: the sampler's softmax temperature.
        outputs: names among those of `SupportScores`. `full_logprobs`, `full_entropy` and `log_mass` cost a projection
            on the whole vocabulary; the support's logits then come from the same projection.
        implementation: "union" projects blocks of tokens on all their candidates; "sparse" (CPU, with the weight in the
            precision of the scores) and "triton" (CUDA) project pairs one by one where that costs less; "reference" is
            the slow one by which they are judged, and holds the `[N, V]` logits; "auto" takes sparse or triton where it
            can, else union.
        empty_rows: "error" refuses rows without recorded support; "full" scores them over the whole vocabulary, at the
            cost of a full projection for those rows.

    Raises:
        ValueError: shapes that disagree, an unknown name, an implementation that cannot run there, a temperature that
            is not above 0, an empty row where they are refused, a candidate beyond the head, a candidate twice in a
            row, a sampled token that is not in its row. (On a GPU the last one is a device-side assertion, so as not to
            wait for the device; so is a candidate beyond a head that is split over ranks.)
    """
    check_arguments(hidden, sampled_ids, support, temperature, outputs, empty_rows)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation='{implementation}' is not among {', '.join(IMPLEMENTATIONS)}.")
    settings = (temperature, tuple(outputs), implementation)
    if not isinstance(head, LMHead | ModelHead):
        raise TypeError(
            f"head is a {type(head).__name__}, neither an LMHead nor what lm_head_from_model returns. Make one: "
            "LMHead(weight)."
        )
    if isinstance(head, LMHead):
        with _token_named(support, sampled_ids, head.weight.shape[0] if head.group is None else None):
            return _score(hidden, head, sampled_ids, support, *settings)

    if implementation == "auto" and FULL_OUTPUTS.isdisjoint(outputs):
        fetched = _score_fetched(hidden, head, sampled_ids, support, *settings)
        if fetched is not None:
            return fetched

    def score(hidden: torch.Tensor, resolved: LMHead) -> tuple[torch.Tensor, ...]:
        device = hidden.device
        with _token_named(support, sampled_ids, resolved.weight.shape[0] if resolved.group is None else None):
            scores = _score(hidden, resolved, sampled_ids.to(device), support.to(device), *settings)
        return tuple(getattr(scores, name) for name in outputs)

    return SupportScores(**dict(zip(outputs, head.call(hidden, score), strict=True)))


def _score_fetched(
    hidden: torch.Tensor,
    head: ModelHead,
    sampled_ids: torch.Tensor,
    support: SupportCSR,
    temperature: float,
    outputs: tuple[str, ...],
    implementation: str,
) -> SupportScores | None:
    """Scores by the union's head rows alone, fetched from where they are; `None` where the head is to be whole."""
    found = head.fetch_rows(lambda: None if support.num_empty else support.by_union[0])
    if found is None:
        return None
    device = found.weight.device
    ids, union, rows = support.to(device).by_union
    sampled = sampled_ids.to(device).long()
    place = torch.searchsorted(union, sampled).clamp(max=max(len(ids) - 1, 0))
    place = torch.where(union[place] == sampled, place, -1) if len(ids) else place
    with _token_named(support, sampled_ids, None):
        return _score(hidden.to(device), found, place, rows, temperature, outputs, implementation)


@contextlib.contextmanager
def _token_named(support: SupportCSR, sampled_ids: torch.Tensor, vocab_size: int | None) -> Iterator[None]:
    """Name the first token that was not sampled from its row, once a block has found that there is one."""
    try:
        yield
    except _UncountedTokenError:
        if sampled_ids.device.type == "cpu":
            support.explain(sampled_ids, vocab_size)
        raise


class _UncountedTokenError(ValueError):
    """Candidates or sampled tokens that no shard has."""


def _score(
    hidden: torch.Tensor,
    head: LMHead,
    sampled_ids: torch.Tensor,
    support: SupportCSR,
    temperature: float,
    outputs: tuple[str, ...],
    implementation: str,
) -> SupportScores:
    if hidden.shape[1] != head.weight.shape[1]:
        raise ValueError(f"hidden has width {hidden.shape[1]} and the head's weight {head.weight.shape[1]}.")
    transform = LogitTransform(head.logit_scale, head.softcap, temperature)
    plan = plan_for(support, head.shard, head.weight.shape[0], choose_kernel(implementation, hidden, head.weight))
    with full_precision(hidden.device):
        hidden, low_rank, lora_b = _shared_inputs(hidden, head)
        if implementation == "reference":
            logits = transform(dense_projection(Projection(hidden, head.weight, head.bias, low_rank, lora_b)))
            return _score_dense(logits, sampled_ids, plan, head.shard, temperature, outputs)

        sampled = sampled_ids.long() - head.vocab_range[0]
        whole = not FULL_OUTPUTS.isdisjoint(outputs)
        pairs, maximum, sum_exp, sum_zexp, target = HeadProjection.apply(
            plan, transform, sampled, whole, hidden, head.weight, head.bias, low_rank, lora_b
        )
        full = RowStatistics(maximum, sum_exp, sum_zexp, target)
        pairs = plan.shifted(transform(pairs), temperature)
        return _finish(pairs, full, sampled, plan, head.group, outputs, len(hidden))


def score_support_from_logits(
    logits: torch.Tensor,
    sampled_ids: torch.Tensor,
    support: SupportCSR,
    *,
    shard: VocabShard | None = None,
    temperature: float = 1.0,
    outputs: Sequence[str] = ("logprobs",),
    empty_rows: str = "error",
) -> SupportScores:
    """Score sampled tokens over their supports, from logits that exist already.

    Args:
        logits: `[N, V_local]`, after scale and softcap, before temperature.
        shard: the part of the vocabulary that `logits` holds; `None` when it holds all.
        sampled_ids, support, temperature, outputs, empty_rows: as in [`score_support`].

    Raises:
        ValueError: as [`score_support`].
    """
    check_arguments(logits, sampled_ids, support, temperature, outputs, empty_rows)
    if shard is not None and shard.stop - shard.start != logits.shape[1]:
        raise ValueError(
            f"The vocabulary shard [{shard.start}, {shard.stop}) has {shard.stop - shard.start} rows and the logits "
            f"{logits.shape[1]} columns."
        )
    plan = plan_for(support, shard, logits.shape[1], "union")
    whole = None if shard is not None and shard.group is not None else plan.num_ids
    with full_precision(logits.device), _token_named(support, sampled_ids, whole):
        logits = logits.to(compute_dtype(logits)) / temperature
        return _score_dense(logits, sampled_ids, plan, shard, temperature, outputs)


def _shared_inputs(hidden: torch.Tensor, head: LMHead) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """What all shards hold alike, with gradients summed over them: hidden states, and their low-rank projection."""
    reduces = head.shard is None or head.shard.reduce_hidden_grad
    lora_a = None if head.lora is None else head.lora.a
    if reduces and lora_a is not None:
        hidden, lora_a = share_with_group(head.group, hidden, lora_a)
    elif reduces:
        (hidden,) = share_with_group(head.group, hidden)
    elif lora_a is not None:
        (lora_a,) = share_with_group(head.group, lora_a)
    if head.lora is None or lora_a is None:
        return hidden, None, None
    dtype = compute_dtype(hidden, head.weight)
    states = hidden if head.lora.dropout is None else head.lora.dropout(hidden)
    return hidden, states.to(dtype) @ lora_a.to(dtype).T * head.lora.scaling, head.lora.b


def _score_dense(
    logits: torch.Tensor,
    sampled_ids: torch.Tensor,
    plan: CandidatePlan,
    shard: VocabShard | None,
    temperature: float,
    outputs: Sequence[str],
) -> SupportScores:
    sampled = sampled_ids.long() - (0 if shard is None else shard.start)
    pair_logits = plan.shifted(logits[plan.rows[plan.pair_rows], plan.pair_ids], temperature)
    if FULL_OUTPUTS.isdisjoint(outputs):
        full = full_statistics(logits[plan.empty_rows], sampled[plan.empty_rows])
    else:
        full = full_statistics(logits, sampled)
    return _finish(pair_logits, full, sampled, plan, None if shard is None else shard.group, outputs, len(logits))


def _finish(
    pair_logits: torch.Tensor,
    full: RowStatistics,
    sampled: torch.Tensor,
    plan: CandidatePlan,
    group: ProcessGroup | None,
    outputs: Sequence[str],
    num_tokens: int,
) -> SupportScores:
    """From this shard's logits to scores.

    `full` covers all tokens when a full-vocabulary output is asked for, else only those without recorded support.
    """
    pairs, found = _sampled_pairs(sampled, plan)
    maximum, sum_exp, sum_zexp, drawn = SegmentStatistics.apply(pair_logits, plan.pair_rows, plan.row_offsets, pairs)
    support = RowStatistics(maximum, sum_exp, sum_zexp, torch.where(found, drawn, 0))
    counts = _local_counts(found, sampled, plan).to(pair_logits.dtype)
    (support, full), counts = _combine_shards([support, full], counts, group)
    _check_counts(counts, plan)

    full_logprob, full_entropy = _logprob(full), _entropy(full)
    whole = not FULL_OUTPUTS.isdisjoint(outputs)

    def by_token(of_rows: torch.Tensor, of_whole: torch.Tensor) -> torch.Tensor:
        # Singletons stay at 0.
        values = of_rows.new_zeros(num_tokens).index_copy(0, plan.rows, of_rows)
        if not len(plan.empty_rows):
            return values  # not even by no token joined with the whole vocabulary, whose backward is dear
        return values.index_copy(0, plan.empty_rows, of_whole[plan.empty_rows] if whole else of_whole)

    scores = SupportScores()
    if "logprobs" in outputs:
        scores.logprobs = by_token(_logprob(support), full_logprob)
    if "support_entropy" in outputs:
        scores.support_entropy = by_token(_entropy(support), full_entropy)
    if "full_logprobs" in outputs:
        scores.full_logprobs = full_logprob
    if "full_entropy" in outputs:
        scores.full_entropy = full_entropy
    if "log_mass" in outputs:
        log_mass = _log_normaliser(support) - _log_normaliser(full)[plan.rows]
        singletons = torch.where(plan.sizes == 1, full_logprob, 0)
        scores.log_mass = singletons.index_copy(0, plan.rows, log_mass)
    return scores


def _sampled_pairs(sampled: torch.Tensor, plan: CandidatePlan) -> tuple[torch.Tensor, torch.Tensor]:
    """`[R]` int64 the pair of each row's sampled token, and `[R]` bool whether this shard has it in that row."""
    drawn, ends = sampled[plan.rows], plan.row_offsets[1:]
    low, high = plan.row_offsets[:-1], ends
    if not plan.num_pairs:
        return torch.zeros_like(drawn), torch.zeros_like(drawn, dtype=torch.bool)
    # Ids rise within a row: halve what is left of each row until its first id that is not below the sampled one.
    for _ in range(plan.widest.bit_length()):
        middle = (low + high) // 2
        below = (plan.pair_ids[middle.clamp(max=plan.num_pairs - 1)] < drawn) & (middle < high)
        low, high = torch.where(below, middle + 1, low), torch.where(below, high, middle)
    pairs = low.clamp(max=plan.num_pairs - 1)
    return pairs, (low < ends) & (plan.pair_ids[pairs] == drawn)


def _local_counts(held: torch.Tensor, sampled: torch.Tensor, plan: CandidatePlan) -> torch.Tensor:
    """What this shard adds to the check of its supports, `[2, N]` int64.

    First how many of the candidates lie here, then how often the sampled id is among them (of a token without recorded
    support: among all ids).

    Args:
        held: `[R]` bool, whether this shard has the sampled token of a row.
    """
    found = torch.zeros_like(plan.owned)
    found[plan.rows] = held.long()
    found[plan.lone_rows] = (plan.lone_ids == sampled[plan.lone_rows]).long()
    unrecorded = sampled[plan.empty_rows]
    found[plan.empty_rows] = ((unrecorded >= 0) & (unrecorded < plan.num_ids)).long()
    return torch.stack([plan.owned, found])


def _combine_shards(
    parts: list[RowStatistics], counts: torch.Tensor, group: ProcessGroup | None
) -> tuple[list[RowStatistics], torch.Tensor]:
    """Statistics and `counts [2, N]` over all shards, by one maximum and one sum over the group."""
    if group is None:
        return parts, counts
    sizes = [len(part.max) for part in parts]
    maxima = max_over_group(torch.cat([part.max for part in parts]), group).split(sizes)
    local = []
    for part, maximum in zip(parts, maxima, strict=True):
        local += [*part.relative_to(maximum), part.target]
    total = sum_over_group(torch.cat([*local, counts.view(-1)]), group)
    *columns, summed = total.split([size for size in sizes for _ in range(3)] + [counts.numel()])
    combined = [RowStatistics(maximum, *columns[3 * i : 3 * i + 3]) for i, maximum in enumerate(maxima)]
    return combined, summed.detach().view_as(counts)


def _logprob(rows: RowStatistics) -> torch.Tensor:
    return (rows.target - rows.max) - rows.sum_exp.log()


def _entropy(rows: RowStatistics) -> torch.Tensor:
    return rows.sum_exp.log() - rows.sum_zexp / rows.sum_exp


def _log_normaliser(rows: RowStatistics) -> torch.Tensor:
    return rows.max + rows.sum_exp.log()


def _check_counts(counts: torch.Tensor, plan: CandidatePlan) -> None:
    """Args: `counts` `[2, N]`, of `_local_counts`, summed over all shards."""
    wanted = torch.stack([plan.sizes, torch.ones_like(plan.sizes)])
    messages = (
        "A support has an id beyond the head.",
        "A sampled token is not among the ids of its support (without one: of the head).",
    )
    right = counts == wanted
    if counts.device.type != "cpu":
        for row, message in zip(right, messages, strict=True):
            torch._assert_async(row.all(), message)
    elif not right.all():
        for row, message in zip(~right, messages, strict=True):
            tokens = row.nonzero().squeeze(1)
            if len(tokens):
                raise _UncountedTokenError(
                    f"{message} First: token {tokens[0]}; so for {len(tokens)} of {len(row)} tokens."
                )
