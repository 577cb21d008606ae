"""`audit_traces`: from traces and a model to an `Audit`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...checks.replay_check import LARGEST_ROUNDING
from .causes import Evidence, Finding, find_causes, verdict
from .gaps import Scored, split_gaps
from .loading import AuditTraces
from .token_scores import RecordedTokens, TokenScorer, routes_for


@dataclass(frozen=True)
class Audit(Evidence):
    """What was found about some traces.

    Attributes:
        findings: causes, faults first.
    """

    findings: list[Finding]

    @property
    def verdict(self) -> str:
        """One sentence: the first fault, or what replay removes."""
        return verdict(self.findings, self.tolerance)


def audit_traces(
    source: AuditTraces,
    model: Any,
    sampler: Any = None,
    *,
    batch_size: int = 8,
    tolerance: float = LARGEST_ROUNDING,
    track: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> Audit:
    """Score traces under a model and say where the gap to the recorded log-probs comes from.

    Args:
        source: the traces, from `load_traces` or of one's own making.
        model: the model whose training is looked at, in memory; a trainer's `model` will do while it is not sharded.
        sampler: the model with the weights that sampled, if available; it separates stale weights from the rest.
        batch_size: traces a forward.
        tolerance: largest gap in nats that counts as rounding; of the mean gap a twentieth of it, as in `replay_check`.
        track: wraps the batches of each pass, to show progress.

    Raises:
        UnreplayableModelError: scores by hidden states and head are not those of the model's own logits.
        UnreplayableRouterError: traces with routes for a model whose routing cannot be replayed.
        MultimodalTraceError: traces of prompts with images.
    """
    tokens = RecordedTokens.of(source.traces)
    has_routes, _ = routes_for(source.traces, model)
    scorer = TokenScorer(model, source.temperature, batch_size, track)
    live = scorer.score(tokens)
    replayed = scorer.score(tokens, replay_routes=True) if has_routes else live
    sampled = None
    if sampler is not None:
        scorer = scorer.like(sampler)
        sampled = scorer.score(tokens, replay_routes=has_routes)
    scores = Scored(live, replayed, sampled)
    parts = split_gaps(tokens, scores)
    evidence = Evidence(source, tokens, scores, parts, tolerance, has_routes, scorer)
    return Audit(**vars(evidence), findings=find_causes(evidence))
