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
    """A logits processor that keeps, for each step, which tokens have a finite score and the sampled one's log-prob.

    It changes nothing. It must be the last of the list, after the warpers that `generate` adds behind the user's own
    processors; `recording` puts it there. Only what survived is kept: memory grows with the supports, not with
    `[steps, batch, vocabulary]`.

    Args:
        eos_token_ids: ids that end a sequence. What `generate` does with a sequence after its end is not recorded.
        truncates: whether anything is cut. When nothing is, a support holds only the sampled token, since the log-prob
            is then over the vocabulary.
    """

    def __init__(self, eos_token_ids: Sequence[int], truncates: bool = True):
        self._eos = torch.tensor(list(eos_token_ids))
        self._truncates = truncates
        self._supports: list[tuple[np.ndarray, np.ndarray]] = []  # for each step: offsets [B + 1], ids [nnz]
        self._logprobs: list[np.ndarray] = []  # for each step but the last: [B], of the token that was drawn
        self._last: torch.Tensor | None = None  # [B, V], log-probs that the latest token is being drawn from
        self._alive: torch.Tensor | None = None

    @property
    def num_steps(self) -> int:
        """Number of steps recorded so far."""
        return len(self._logprobs) + (self._last is not None)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._last is None:
            self._alive = torch.ones(len(input_ids), dtype=torch.bool, device=scores.device)
        else:
            drawn = input_ids[:, -1:]
            assert self._alive is not None
            self._alive &= ~torch.isin(drawn[:, 0], self._eos.to(drawn.device))
            self._logprobs.append(self._last.gather(1, drawn)[:, 0].double().cpu().numpy())
        # `generate` draws from softmax(scores), in the scores' own data type (float32).
        self._last = torch.log_softmax(scores, dim=-1)
        if self._truncates:
            assert self._alive is not None
            rows, ids = (torch.isfinite(scores) & self._alive[:, None]).nonzero(as_tuple=True)
            sizes = torch.bincount(rows, minlength=len(scores)).cpu().numpy()
            self._supports.append((np.concatenate([[0], np.cumsum(sizes)]), ids.to(torch.int32).cpu().numpy()))
        return scores

    def collect(self, completion_ids: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, SupportRows]]:
        """For each completion of length `T`: `[T]` float64 log-probs of its tokens, and their `T` supports.

        Args:
            completion_ids: the batch's completions, cut after their end of sequence.

        Raises:
            SupportCaptureError: when a completion is longer than what was recorded, or a token is not in its support.
        """
        num_steps = self.num_steps
        collected = []
        for b, completion in enumerate(completion_ids):
            if len(completion) > num_steps:
                raise SupportCaptureError(
                    f"Completion {b} has {len(completion)} tokens, but {num_steps} steps were recorded."
                )
            logprobs = np.array([step[b] for step in self._logprobs[: len(completion)]])
            if len(completion) == num_steps > 0:
                assert self._last is not None
                logprobs = np.append(logprobs, self._last[b, completion[-1]].double().item())
            if not np.isfinite(logprobs).all():
                token = int(np.argmin(np.isfinite(logprobs)))
                raise SupportCaptureError(
                    f"Token {token} of completion {b} (id {completion[token]}) is not in its recorded support: its "
                    f"log-prob is {logprobs[token]}."
                )
            if self._truncates:
                steps = self._supports[: len(completion)]
                rows = SupportRows.from_ragged([ids[offsets[b] : offsets[b + 1]] for offsets, ids in steps])
            else:
                rows = SupportRows.from_ragged([[token] for token in completion])
            collected.append((logprobs, rows))
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
