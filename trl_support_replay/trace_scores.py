"""Scores of saved traces under a model: over the supports, over the vocabulary, and the mass of the supports."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from .model_probe import Probe
from .replay_head import ReplayBatch, add_replay_head
from .traces.columns import Trace

SCORES = ("logprobs", "full_logprobs", "log_mass", "support_entropy")


class ScoringModelError(ValueError):
    """A model that cannot be loaded, or that traces cannot be scored with."""


def load_model(
    option: str, name: str, *, dtype: str, device: str | None = None, revision: str | None = None
) -> PreTrainedModel:
    """A causal language model to score with.

    Args:
        option: what the user named it with, for the error.
        name: a folder or a Hub name.
        dtype: name of a data type of torch.
        device: where to put it; `None` for the GPU when there is one, else the CPU.
        revision: of a Hub name.

    Raises:
        ScoringModelError: there is no such model, no such revision of it, or no such device.
    """
    if revision is not None and os.path.isdir(name):
        raise ScoringModelError(
            f"{option} {name} is a folder, and a revision ({revision}) belongs to a name on the Hub. Leave it "
            "out, or name the folder of the other weights."
        )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ScoringModelError(
            f"device={device!r} is not to be had here ({str(error).splitlines()[0]}). Name another one, as cpu."
        ) from error
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            name, revision=revision or "main", dtype=getattr(torch, dtype)
        )
    except (OSError, ValueError) as error:
        at = f" at revision {revision}" if revision else ""
        raise ScoringModelError(
            f"{option} {name}{at} cannot be loaded; give a folder with a causal language model or a Hub name. "
            f"{str(error).splitlines()[0]}"
        ) from error
    return model.to(device)


def check_vocabulary(traces: Sequence[Trace], model: PreTrainedModel, option: str) -> None:
    """Raise unless the model has every id of the traces.

    Args:
        traces: what is going to be scored.
        model: what is going to score them.
        option: what the user named the model with, for the error.

    Raises:
        ScoringModelError: naming the largest id and the size of the model's vocabulary.
    """
    vocab_size = model.config.get_text_config().vocab_size
    arrays = [ids for t in traces for ids in (t.prompt_ids, t.completion_ids, t.supports.token_ids)]
    largest = max((int(ids.max(initial=-1)) for ids in arrays), default=-1)
    if largest >= vocab_size:
        raise ScoringModelError(
            f"{option} {model.name_or_path} has a vocabulary of {vocab_size} ids, and the traces hold the id "
            f"{largest}: they were sampled from a model with another vocabulary. Name one with the sampler's."
        )


def padded_batch(traces: Sequence[Trace]) -> tuple[np.ndarray, np.ndarray, int]:
    """Traces as one batch: prompts padded on the left to `P` columns, completions on the right to `T`.

    Returns:
        Ids and attention mask, `[B, P + T]` int64, and `P`.
    """
    prompt = max(len(t.prompt_ids) for t in traces)
    completion = max(max(len(t.completion_ids) for t in traces), 1)
    ids = np.zeros((len(traces), prompt + completion), np.int64)
    mask = np.zeros_like(ids)
    for b, trace in enumerate(traces):
        row = np.concatenate([trace.prompt_ids, trace.completion_ids])
        first = prompt - len(trace.prompt_ids)
        ids[b, first : first + len(row)] = row
        mask[b, first : first + len(row)] = 1
    return ids, mask, prompt


class TraceScorer:
    """Scores traces with a causal language model, in batches.

    Args:
        model: the model; its forward gains the replay head.
        temperature: the sampler's temperature.
        batch_size: traces a forward.

    Raises:
        UnreplayableModelError: scores by hidden states and head are not those of the model's own logits.
    """

    def __init__(self, model: PreTrainedModel, temperature: float, batch_size: int = 8):
        add_replay_head(model)
        self._model = model.eval()
        self._temperature = temperature
        self._batch_size = batch_size
        Probe.run(model).check_scores(model, self._two_scores, temperature)

    def _two_scores(self, traces: Sequence[Trace]) -> list[torch.Tensor]:
        scores = self.score(traces)
        return [torch.from_numpy(np.concatenate(scores[name])) for name in ("logprobs", "full_logprobs")]

    def score(self, traces: Sequence[Trace]) -> dict[str, list[np.ndarray]]:
        """For each of `SCORES`, one `[T]` float32 array a trace; NaN where the token was not sampled."""
        results: dict[str, list[np.ndarray]] = {name: [np.empty(0)] * len(traces) for name in SCORES}
        # Traces of like length share a batch, so that little is padded.
        order = sorted(range(len(traces)), key=lambda i: len(traces[i].completion_ids))
        for start in range(0, len(order), self._batch_size):
            chosen = order[start : start + self._batch_size]
            for i, scores in zip(chosen, self._forward([traces[i] for i in chosen]), strict=True):
                for name in SCORES:
                    results[name][i] = scores[name]
        return results

    @torch.no_grad()
    def _forward(self, traces: Sequence[Trace]) -> list[dict[str, np.ndarray]]:
        ids, mask, prompt = padded_batch(traces)
        completion = ids.shape[1] - prompt
        device = next(self._model.parameters()).device
        batch = ReplayBatch.build(
            traces,
            ids.shape,
            completion,
            device,
            temperature=self._temperature,
            log_probs=SCORES[0],
            entropy=None,
            extra=SCORES[1:],
        )
        output = self._model(
            input_ids=torch.from_numpy(ids).to(device), attention_mask=torch.from_numpy(mask).to(device), replay=batch
        )
        grids = {SCORES[0]: output.log_probs, **dict(zip(SCORES[1:], output.extra or (), strict=True))}
        scores = []
        for b, trace in enumerate(traces):
            row = {}
            for name, grid in grids.items():
                values = grid[b, prompt - 1 : prompt - 1 + len(trace.completion_ids)].float().cpu().numpy().copy()
                values[~trace.loss_mask] = np.nan
                row[name] = values
            scores.append(row)
        return scores
