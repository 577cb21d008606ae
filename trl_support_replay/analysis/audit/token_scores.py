"""Scores the tokens of saved traces under one model, for the commands `score` and `audit`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...batch.layout import BatchLayout, first_columns, padded_batch
from ...policy.model_probe import Probe, causal_model
from ...routing import RouteBatch, RouteMetrics, RouterReplay, has_experts
from ...routing.discovery import evaluating
from ...scoring import lm_head_from_model, score_candidates, score_support
from ...traces.columns import Trace
from ...traces.multimodal import check_no_placeholders
from ...traces.support import SupportRows

_OUTPUTS = ("logprobs", "full_logprobs", "log_mass", "support_entropy")


@dataclass(frozen=True)
class RecordedTokens:
    """The tokens that enter the loss, of all traces one after another: those with a recorded support, or all.

    Attributes:
        traces: where they come from.
        trace: `[N]` int64, index of each token's trace.
        position: `[N]` int64, its place in the completion, rising within a trace.
        recorded: `[N]` float64, log-prob that the engine reported.
        supports: `N` supports; empty for an end of sequence that nobody sampled.
    """

    traces: Sequence[Trace]
    trace: np.ndarray
    position: np.ndarray
    recorded: np.ndarray
    supports: SupportRows

    @classmethod
    def of(cls, traces: Sequence[Trace], unsupported: bool = False) -> RecordedTokens:
        """The tokens of these traces; with `unsupported` also an end of sequence that nobody sampled."""
        places = [np.flatnonzero(t.loss_mask & ((t.supports.sizes > 0) | unsupported)) for t in traces]
        return cls(
            traces=traces,
            trace=np.repeat(np.arange(len(traces)), [len(place) for place in places]),
            position=np.concatenate([np.zeros(0, np.int64), *places]),
            recorded=np.concatenate(
                [np.zeros(0), *(t.sampling_logprobs[p] for t, p in zip(traces, places, strict=True))]
            ).astype(np.float64),
            supports=SupportRows.concatenate([t.supports[p] for t, p in zip(traces, places, strict=True)]),
        )

    def __len__(self) -> int:
        return len(self.trace)

    @property
    def sampled_ids(self) -> np.ndarray:
        """`[N]` int64."""
        ids = [self.traces[b].completion_ids[p] for b, p in zip(self.trace, self.position, strict=True)]
        return np.array(ids, dtype=np.int64)

    def spread(self, values: np.ndarray) -> list[np.ndarray]:
        """`[N]` values as one `[T]` float32 array for each trace; NaN at its other tokens."""
        columns = [np.full(len(trace.completion_ids), np.nan, np.float32) for trace in self.traces]
        for b, column in enumerate(columns):
            rows = self.trace == b
            column[self.position[rows]] = values[rows]
        return columns


@dataclass(frozen=True)
class TokenScores:
    """Scores of `N` recorded tokens under one model, float64. An empty support counts as the whole vocabulary.

    Attributes:
        logprobs: `[N]`, over the recorded support.
        full_logprobs: `[N]`, over the whole vocabulary.
        log_mass: `[N]`, log of the whole-vocabulary probability of the support.
        support_entropy: `[N]`, entropy over the support, in nats.
        candidates: `[nnz]`, log-probs of all candidates over their support, in the order of the supports' ids.
        agreement: how far the live routers would have chosen the replayed experts; `None` where nothing was replayed.
    """

    logprobs: np.ndarray
    full_logprobs: np.ndarray
    log_mass: np.ndarray
    support_entropy: np.ndarray
    candidates: np.ndarray
    agreement: float | None = None


def routes_for(traces: Sequence[Trace], model: Any) -> tuple[bool, str]:
    """Whether traces are to be scored through recorded experts, and a sentence that says so."""
    lacking = sum(trace.routes is None for trace in traces)
    if not has_experts(model):
        return False, "has no experts, so no routes are replayed"
    if traces and not lacking:
        return True, "is scored through the recorded experts"
    hold = (
        "the traces hold no routes" if lacking == len(traces) else f"{lacking} of {len(traces)} traces hold no routes"
    )
    return False, f"chooses the experts by its own routers, since {hold}; a gap may come from that"


class TokenScorer:
    """Scores recorded tokens with a causal language model, without touching its forward.

    The model runs in evaluation mode while it scores, and is left in the mode that it had.

    Args:
        model: a `PreTrainedModel`, or one with adapters of PEFT. Not sharded.
        temperature: the sampler's.
        batch_size: traces a forward.
        track: wraps the batches of a pass, to show progress.

    Raises:
        UnreplayableModelError: scores by hidden states and head are not those of the model's own logits.
    """

    def __init__(
        self,
        model: Any,
        temperature: float,
        batch_size: int = 8,
        track: Callable[[Sequence[int]], Iterable[int]] = iter,
    ):
        self.model = model
        self._causal = causal_model(model)
        self._temperature = temperature
        self._batch_size = batch_size
        self._track: Callable[[Sequence[int]], Iterable[int]] = iter
        self._replay: RouterReplay | None = None
        Probe.run(model).check_scores(model, self._two_scores, temperature)
        self._track = track

    def _two_scores(self, traces: Sequence[Trace]) -> list[torch.Tensor]:
        scores = self.score(RecordedTokens.of(traces))
        return [torch.from_numpy(scores.logprobs), torch.from_numpy(scores.full_logprobs)]

    def like(self, model: Any) -> TokenScorer:
        """A scorer of another model, otherwise the same."""
        return TokenScorer(model, self._temperature, self._batch_size, self._track)

    def score(self, tokens: RecordedTokens, replay_routes: bool = False) -> TokenScores:
        """Score all tokens, through the live routers or through the recorded experts.

        Raises:
            MultimodalTraceError: traces of prompts with images.
            UnreplayableRouterError, RouterReplayError: recorded experts that the model's routers could not have chosen.
        """
        check_no_placeholders(tokens.traces, self._causal.config)
        counts = np.bincount(tokens.trace, minlength=len(tokens.traces))
        sizes = np.bincount(tokens.trace, weights=tokens.supports.sizes, minlength=len(tokens.traces)).astype(np.int64)
        parts: list[dict[str, np.ndarray]] = [{}] * len(tokens.traces)
        routed: list[RouteMetrics] = []
        # Traces of like length share a batch, so that little is padded.
        order = sorted(np.flatnonzero(counts), key=lambda b: len(tokens.traces[b].completion_ids))
        with evaluating(self.model):
            for start in self._track(range(0, len(order), self._batch_size)):
                chosen = order[start : start + self._batch_size]
                scores, routes = self._forward(tokens, chosen, replay_routes)
                routed += [] if routes is None else [routes]
                for name, values in scores.items():
                    lengths = sizes if name == "candidates" else counts
                    for b, part in zip(chosen, np.split(values, np.cumsum(lengths[chosen])[:-1]), strict=True):
                        parts[b] = parts[b] | {name: part}
        names = (*_OUTPUTS, "candidates")
        joined = {n: np.concatenate([np.zeros(0), *(part[n] for part in parts if part)]) for n in names}
        return TokenScores(**joined, agreement=sum(routed[1:], routed[0]).agreement if routed else None)

    def _forward(
        self, tokens: RecordedTokens, chosen: Sequence[int], replay_routes: bool
    ) -> tuple[dict[str, np.ndarray], RouteMetrics | None]:
        traces = [tokens.traces[b] for b in chosen]
        ids, mask, completion_length = padded_batch(traces)
        device = next(self._causal.parameters()).device
        inputs = {"input_ids": torch.from_numpy(ids).to(device), "attention_mask": torch.from_numpy(mask).to(device)}
        routes = None
        if replay_routes:
            self._replay = self._replay or RouterReplay(self._causal)
            starts = first_columns(traces, ids.shape[1], completion_length)
            batch = RouteBatch.from_samples([t.routes for t in traces if t.routes is not None], starts, ids.shape[1])
            with self._replay.scope(batch) as scope:
                hidden = self._causal.base_model(**inputs, use_cache=False).last_hidden_state  # [B, P + T, H]
            routes = scope.metrics
        else:
            hidden = self._causal.base_model(**inputs, use_cache=False).last_hidden_state
        scored = [tokens.position[tokens.trace == b] for b in chosen]
        layout = BatchLayout.build(traces, (len(traces), ids.shape[1]), completion_length, device, scored)
        hidden, head = hidden.flatten(0, 1)[layout.positions.states], lm_head_from_model(self._causal)  # [n, H]
        scores = score_support(
            hidden,
            head,
            layout.positions.sampled_ids,
            layout.support,
            temperature=self._temperature,
            outputs=_OUTPUTS,
            empty_rows="full",
        )
        found = {name: getattr(scores, name) for name in _OUTPUTS}
        found["candidates"] = score_candidates(hidden, head, layout.support, temperature=self._temperature)
        return {name: values.double().cpu().numpy() for name, values in found.items()}, routes
