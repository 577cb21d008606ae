"""Supports from `transformers` `generate`: read off the processed scores, step by step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor

from ..traces.support import SupportRows
from .recorder import SupportCaptureError


class ScoresRecorder(LogitsProcessor):
    """A logits processor that keeps, for each step, which tokens have a finite score and their log-probs.

    It changes nothing. It must be the last of the list, after the warpers that `generate` adds behind the user's own
    processors; `recording` puts it there. Only what survived is kept: memory grows with the supports, not with
    `[steps, batch, vocabulary]`.

    Args:
        eos_token_ids: ids that end a sequence. What `generate` does with a sequence after its end is not recorded.
    """

    def __init__(self, eos_token_ids: Sequence[int]):
        self._eos = torch.tensor(list(eos_token_ids))
        self._steps: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # sizes [B], ids [nnz], log-probs [nnz]
        self._alive: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._alive is None:
            self._alive = torch.ones(len(input_ids), dtype=torch.bool, device=scores.device)
        else:
            self._alive &= ~torch.isin(input_ids[:, -1], self._eos.to(input_ids.device))
        kept = torch.isfinite(scores) & self._alive[:, None]
        # `generate` draws from softmax(scores), computed in the scores' own data type (float32).
        log_probs = torch.log_softmax(scores, dim=-1)
        rows, ids = kept.nonzero(as_tuple=True)
        sizes = torch.bincount(rows, minlength=len(scores))
        self._steps.append(
            (sizes.cpu().numpy(), ids.to(torch.int32).cpu().numpy(), log_probs[kept].double().cpu().numpy())
        )
        return scores

    def collect(self, completion_ids: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, SupportRows]]:
        """For each completion of length `T`: `[T]` float64 log-probs of its tokens, and their `T` supports.

        Args:
            completion_ids: the batch's completions, cut after their end of sequence.

        Raises:
            SupportCaptureError: when a completion is longer than what was recorded, or a token is not in its support.
        """
        offsets = [np.concatenate([[0], np.cumsum(sizes)]) for sizes, _, _ in self._steps]
        collected = []
        for b, completion in enumerate(completion_ids):
            if len(completion) > len(self._steps):
                raise SupportCaptureError(
                    f"Completion {b} has {len(completion)} tokens, but {len(self._steps)} steps were recorded."
                )
            spans = [(o[b], o[b + 1]) for o in offsets[: len(completion)]]
            steps = self._steps[: len(completion)]
            row_ids = [ids[start:stop] for (start, stop), (_, ids, _) in zip(spans, steps, strict=True)]
            logprobs = np.zeros(len(completion))
            for t, ((start, stop), (_, _, values)) in enumerate(zip(spans, steps, strict=True)):
                hit = np.flatnonzero(row_ids[t] == completion[t])
                if len(hit) != 1:
                    raise SupportCaptureError(
                        f"Token {t} of completion {b} (id {completion[t]}) is not in its recorded support of "
                        f"{stop - start} tokens."
                    )
                logprobs[t] = values[start + hit[0]]
            collected.append((logprobs, SupportRows.from_ragged(row_ids)))
        return collected


@contextlib.contextmanager
def recording(model: Any, recorder: ScoresRecorder) -> Iterator[None]:
    """While the block runs, `model.generate` hands the final scores of each step to `recorder`.

    Args:
        model: the `PreTrainedModel` whose `generate` runs (under PEFT: the base model).
        recorder: what records.
    """
    build = model._get_logits_processor

    def build_with_recorder(*args: Any, **kwargs: Any) -> Any:
        processors = build(*args, **kwargs)
        processors.append(recorder)
        return processors

    model._get_logits_processor = build_with_recorder
    try:
        yield
    finally:
        del model._get_logits_processor
