"""Every score of every recorded token that an audit compares, under one model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..model_probe import Probe
from ..routing import RouteBatch, RouterReplay
from ..scoring import SupportCSR, lm_head_from_model, score_candidates, score_support
from ..trace_scores import padded_batch
from ..traces.columns import Trace
from ..traces.support import SupportRows


@dataclass(frozen=True)
class RecordedTokens:
    """The tokens that have a recorded support and enter the loss, of all traces one after another.

    Attributes:
        traces: where they come from.
        trace: `[N]` int64, index of each token's trace.
        position: `[N]` int64, its place in the completion, rising within a trace.
        recorded: `[N]` float64, log-prob that the engine reported.
        supports: `N` supports.
    """

    traces: Sequence[Trace]
    trace: np.ndarray
    position: np.ndarray
    recorded: np.ndarray
    supports: SupportRows

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> RecordedTokens:
        places = [np.flatnonzero(t.loss_mask & (t.supports.sizes > 0)) for t in traces]
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


@dataclass(frozen=True)
class TokenScores:
    """Scores of `N` recorded tokens under one model, float64.

    Attributes:
        logprobs: `[N]`, over the recorded support.
        full_logprobs: `[N]`, over the whole vocabulary.
        log_mass: `[N]`, log of the whole-vocabulary probability of the support.
        candidates: `[nnz]`, log-probs of all candidates over their support, in the order of the supports' ids.
        agreement: how far the live routers would have chosen the replayed experts; `None` where nothing was replayed.
    """

    logprobs: np.ndarray
    full_logprobs: np.ndarray
    log_mass: np.ndarray
    candidates: np.ndarray
    agreement: float | None = None


class TokenScorer:
    """Scores recorded tokens with a causal language model, without touching its forward.

    The model runs in evaluation mode while it scores, and is left in the mode that it had.

    Args:
        model: a `PreTrainedModel`, or one with adapters of PEFT. Not sharded.
        temperature: the sampler's.
        batch_size: traces a forward.
        track: wraps the batches of a pass, to show how far it is.
    """

    def __init__(
        self,
        model: Any,
        temperature: float,
        batch_size: int = 8,
        track: Callable[[Sequence[int]], Iterable[int]] = iter,
    ):
        self.model = model
        self._causal = model.get_base_model() if hasattr(model, "peft_config") else model
        self._temperature = temperature
        self._batch_size = batch_size
        self._track = track
        self._replay: RouterReplay | None = None

    def check_model(self) -> None:
        """Raise `UnreplayableModelError` unless scores are those of the model's own logits."""

        def score(traces: Sequence[Trace]) -> list[torch.Tensor]:
            scores = self.score(RecordedTokens.of(traces))
            return [torch.from_numpy(scores.logprobs), torch.from_numpy(scores.full_logprobs)]

        Probe.run(self.model).check_scores(self.model, score, self._temperature)

    def like(self, model: Any) -> TokenScorer:
        """A scorer of another model, otherwise the same."""
        return TokenScorer(model, self._temperature, self._batch_size, self._track)

    @torch.no_grad()
    def score(self, tokens: RecordedTokens, replay_routes: bool = False) -> TokenScores:
        """Score all tokens, through the live routers or through the recorded experts."""
        counts = np.bincount(tokens.trace, minlength=len(tokens.traces))
        sizes = np.bincount(tokens.trace, weights=tokens.supports.sizes, minlength=len(tokens.traces)).astype(np.int64)
        parts: list[dict[str, np.ndarray]] = [{}] * len(tokens.traces)
        agreements = []
        # Traces of like length share a batch, so that little is padded.
        order = sorted(np.flatnonzero(counts), key=lambda b: len(tokens.traces[b].completion_ids))
        with _evaluating(self.model):
            for start in self._track(range(0, len(order), self._batch_size)):
                chosen = order[start : start + self._batch_size]
                scores, agreement = self._forward(tokens, chosen, replay_routes)
                agreements.append(agreement)
                for name, values in scores.items():
                    lengths = sizes if name == "candidates" else counts
                    for b, part in zip(chosen, np.split(values, np.cumsum(lengths[chosen])[:-1]), strict=True):
                        parts[b] = parts[b] | {name: part}
        names = ("logprobs", "full_logprobs", "log_mass", "candidates")
        joined = {n: np.concatenate([np.zeros(0), *(part[n] for part in parts if part)]) for n in names}
        known = [a for a in agreements if a is not None]
        return TokenScores(**joined, agreement=float(np.mean(known)) if known else None)

    def _forward(
        self, tokens: RecordedTokens, chosen: Sequence[int], replay_routes: bool
    ) -> tuple[dict[str, np.ndarray], float | None]:
        traces = [tokens.traces[b] for b in chosen]
        ids, mask, prompt = padded_batch(traces)
        device = next(self._causal.parameters()).device
        inputs = {"input_ids": torch.from_numpy(ids).to(device), "attention_mask": torch.from_numpy(mask).to(device)}
        agreement = None
        if replay_routes:
            self._replay = self._replay or RouterReplay(self._causal)
            starts = [prompt - len(trace.prompt_ids) for trace in traces]
            batch = RouteBatch.from_samples([t.routes for t in traces if t.routes is not None], starts, ids.shape[1])
            with self._replay.scope(batch) as scope:
                hidden = self._causal.base_model(**inputs, use_cache=False).last_hidden_state  # [B, P + T, H]
            agreement = scope.metrics.agreement
        else:
            hidden = self._causal.base_model(**inputs, use_cache=False).last_hidden_state
        rows = [np.flatnonzero(tokens.trace == b) for b in chosen]
        here = np.concatenate(rows)
        sample = np.repeat(np.arange(len(chosen)), [len(row) for row in rows])
        # The token in column c is predicted at column c - 1.
        columns = prompt - 1 + tokens.position[here]
        hidden = hidden[torch.from_numpy(sample).to(device), torch.from_numpy(columns).to(device)]  # [n, H]
        supports = tokens.supports[here]
        csr = SupportCSR.from_numpy(supports.token_ids, supports.offsets, device=device)
        head = lm_head_from_model(self._causal)
        sampled = torch.from_numpy(ids[sample, columns + 1]).to(device)
        outputs = ("logprobs", "full_logprobs", "log_mass")
        scores = score_support(hidden, head, sampled, csr, temperature=self._temperature, outputs=outputs)
        found = {name: getattr(scores, name) for name in outputs}
        found["candidates"] = score_candidates(hidden, head, csr, temperature=self._temperature)
        return {name: values.double().cpu().numpy() for name, values in found.items()}, agreement


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
