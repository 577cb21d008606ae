"""Supports from `transformers` `generate`: read off the processed scores, step by step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, StoppingCriteriaList

from ..engine_outputs.errors import SupportCaptureError
from ..engine_outputs.vllm_outputs import IMPOSSIBLE
from ..traces.support import SupportRows


class ScoresRecorder(LogitsProcessor):
    """A logits processor that keeps, for each step, which tokens can be drawn, and the log-prob of the one that was.

    It changes nothing. It must be the last of the list, after the warpers that `generate` adds behind the user's own
    processors; `recording` puts it there, and tells it which sequences `generate` has stopped. What `generate` fills in
    behind the end of a sequence is not recorded. Only what survived is kept: memory grows with the supports, not with
    `[steps, batch, vocabulary]`.

    Args:
        truncates: whether any token may be cut. When none may, a support holds only the sampled token, since the
            log-prob is then over the vocabulary.
    """

    def __init__(self, truncates: bool = True):
        self._truncates = truncates
        self._supports: list[tuple[np.ndarray, np.ndarray]] = []  # for each step: offsets [B + 1], ids [nnz]
        self._logprobs: list[np.ndarray] = []  # for each step but the last: [B], of the token that was drawn
        self._last: torch.Tensor | None = None  # [B, V], log-probs that the latest token is being drawn from
        self._alive: torch.Tensor | None = None  # [B], sequences that have not been stopped
        self._lengths: torch.Tensor | None = None  # [B], tokens that were drawn for each

    @property
    def num_steps(self) -> int:
        """Number of steps recorded so far."""
        return len(self._logprobs) + (self._last is not None)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._last is None:
            self._alive = torch.ones(len(input_ids), dtype=torch.bool, device=scores.device)
            self._lengths = torch.zeros(len(input_ids), dtype=torch.int64, device=scores.device)
        else:
            drawn = input_ids[:, -1:]
            self._logprobs.append(self._last.gather(1, drawn)[:, 0].double().cpu().numpy())
        # `generate` draws from softmax(scores), in the scores' own data type (float32).
        self._last = torch.log_softmax(scores, dim=-1)
        if self._truncates:
            assert self._alive is not None
            self._supports.append(_possible(self._last, self._alive))
        return scores

    def stopped(self, done: torch.Tensor) -> None:
        """Take note of the sequences that `generate` stops with the token just drawn, `done` `[B]`."""
        assert self._alive is not None and self._lengths is not None
        self._lengths += self._alive
        self._alive &= ~done.to(self._alive.device)

    def trim(self, completion_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """The batch's completions without what `generate` filled in behind the end of each."""
        lengths = [] if self._lengths is None else self._lengths.tolist()
        return [list(ids[:length]) for ids, length in zip(completion_ids, lengths, strict=True)]

    def collect(self, completion_ids: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, SupportRows]]:
        """For each completion of length `T`: `[T]` float64 log-probs of its tokens, and their `T` supports.

        Args:
            completion_ids: the batch's completions, trimmed.

        Raises:
            SupportCaptureError: when a completion is longer than what was recorded, or a token is not in its support.
        """
        num_steps = self.num_steps
        lengths = [0] * len(completion_ids) if self._lengths is None else self._lengths.tolist()
        collected = []
        for b, completion in enumerate(completion_ids):
            if len(completion) > num_steps:
                raise SupportCaptureError(
                    f"Completion {b} has {len(completion)} tokens, but {num_steps} steps were recorded."
                )
            if len(completion) > lengths[b]:
                raise SupportCaptureError(
                    f"Completion {b} has {len(completion)} tokens, but `generate` stopped it after {lengths[b]}; the "
                    "others were filled in."
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


def _possible(logprobs: torch.Tensor, alive: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Offsets `[B + 1]` int64 of rows, and ids `[nnz]` int32 of what can be drawn in them; none in a stopped sequence.

    Args:
        logprobs: `[B, V]`.
        alive: `[B]`.
    """
    if logprobs.device.type == "cpu":
        # NumPy takes a fifth of the time of PyTorch for this.
        table = logprobs.float().numpy() >= IMPOSSIBLE
        table[~alive.numpy()] = False
        cells = np.flatnonzero(table)
    else:
        cells = ((logprobs >= IMPOSSIBLE) & alive[:, None]).flatten().nonzero()[:, 0].cpu().numpy()
    starts = np.arange(len(logprobs) + 1) * logprobs.shape[1]
    offsets = np.searchsorted(cells, starts)
    return offsets, (cells - np.repeat(starts[:-1], np.diff(offsets))).astype(np.int32)


class _ToldStops(StoppingCriteriaList):
    """The criteria that `generate` made, which tell what they decide."""

    def __init__(self, criteria: StoppingCriteriaList, tell: Callable[[torch.Tensor], None]):
        super().__init__(criteria)
        self._tell = tell

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        done = super().__call__(input_ids, scores, **kwargs)
        self._tell(done)
        return done


@contextlib.contextmanager
def recording(
    model: Any, recorder: ScoresRecorder, on_stop_ids: Callable[[list[int]], None] = lambda ids: None
) -> Iterator[None]:
    """While the block runs, `model.generate` hands the final scores of each step, and what it stops, to `recorder`.

    Args:
        model: the `PreTrainedModel` whose `generate` runs (under PEFT: the base model).
        recorder: what records.
        on_stop_ids: is told the ids at which `generate` stops, before it starts; an empty list when there are none.
    """
    build_processors, build_criteria = model._get_logits_processor, model._get_stopping_criteria

    def processors_with_recorder(*args: Any, **kwargs: Any) -> Any:
        processors = build_processors(*args, **kwargs)
        processors.append(recorder)
        return processors

    def told_criteria(*args: Any, **kwargs: Any) -> Any:
        criteria = build_criteria(*args, **kwargs)
        ids = [c.eos_token_id for c in criteria if hasattr(c, "eos_token_id")]
        on_stop_ids([int(i) for of_one in ids for i in of_one.flatten()])
        return _ToldStops(criteria, recorder.stopped)

    model._get_logits_processor, model._get_stopping_criteria = processors_with_recorder, told_criteria
    try:
        yield
    finally:
        del model._get_logits_processor, model._get_stopping_criteria
