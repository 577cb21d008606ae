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

# Tables of what can be drawn are kept up to this size before ids are read off them.
_TABLE_BYTES = 2**20


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
        self._tables: list[Any] = []  # for each of the latest steps: [B, V] bool, what can be drawn
        self._supports: list[SupportRows] = []  # of the steps before them: B rows of each
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
            if scores.device.type == "cpu":
                # NumPy takes a fifth of the time of PyTorch for this.
                table: Any = self._last.float().numpy() >= IMPOSSIBLE
                table[~self._alive.numpy()] = False
            else:
                table = (self._last >= IMPOSSIBLE) & self._alive[:, None]
            self._tables.append(table)
            if len(self._tables) * scores.numel() > _TABLE_BYTES:
                self._read_tables()
        return scores

    def _read_tables(self) -> None:
        """Turn the tables into rows of ids: several at once, since a short table takes as long as a few of them."""
        if not self._tables:
            return
        if isinstance(self._tables[0], np.ndarray):
            cells = np.flatnonzero(np.stack(self._tables))
        else:
            cells = torch.stack(self._tables).flatten().nonzero()[:, 0].cpu().numpy()
        num_sequences, width = self._tables[0].shape
        starts = np.arange(len(self._tables) * num_sequences + 1) * width
        offsets = np.searchsorted(cells, starts)
        ids = cells - np.repeat(starts[:-1], np.diff(offsets))
        self._supports.append(SupportRows(ids.astype(np.int32), offsets))
        self._tables = []

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
        self._read_tables()
        supports = SupportRows.concatenate(self._supports)  # [steps * B]
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
                rows = supports.take(np.arange(len(completion)) * len(completion_ids) + b)
            else:
                rows = SupportRows.from_ragged([[token] for token in completion])
            collected.append((logprobs, rows))
        return collected


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
