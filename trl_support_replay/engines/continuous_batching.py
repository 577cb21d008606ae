"""Supports from continuous batching of `transformers`: the rows of each forward are given to their requests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor

from ..engine_outputs.errors import SupportCaptureError
from ..engine_outputs.vllm_outputs import IMPOSSIBLE
from ..libraries.rebind import rebound
from ..traces.support import SupportRows


class BatchRecorder(LogitsProcessor):
    """A logits processor that keeps, for each request, which tokens can be drawn, and the log-prob of the one that was.

    It changes nothing. It must be the last of the list, and needs a batch to be updated before the next one is drawn;
    `recording_batches` sees to both, and tells it which rows belong to which requests.
    """

    supports_continuous_batching = True

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None  # [rows, V], log-probs that a batch's tokens are being drawn from
        self._recorded: dict[str, list[tuple[float, np.ndarray]]] = {}
        self.requests: list[str] = []  # in the order of the prompts

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._last = torch.log_softmax(scores, dim=-1)
        return scores

    def drawn(self, request: str, row: int, token: int) -> None:
        """Take note that `token` was drawn for a request, from this row of the latest batch."""
        assert self._last is not None
        ids = (self._last[row] >= IMPOSSIBLE).nonzero()[:, 0].to(torch.int32).cpu().numpy()
        self._recorded.setdefault(request, []).append((self._last[row, token].double().item(), ids))

    def collect(self, completion_ids: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, SupportRows]]:
        """For each completion of length `T`: `[T]` float64 log-probs of its tokens, and their `T` supports.

        Args:
            completion_ids: the completions, in the order of the prompts.

        Raises:
            SupportCaptureError: when other tokens were recorded, or a token is not in its support.
        """
        collected = []
        for b, (request, ids) in enumerate(zip(self.requests, completion_ids, strict=True)):
            recorded = self._recorded.get(request, [])
            if len(recorded) != len(ids):
                raise SupportCaptureError(f"Completion {b} has {len(ids)} tokens, but {len(recorded)} were recorded.")
            rows = SupportRows.from_ragged([support for _, support in recorded])
            contained = rows.contains(np.asarray(ids, dtype=np.int32))
            if not contained.all():
                token = int(np.argmin(contained))
                raise SupportCaptureError(f"Token {token} of completion {b} (id {ids[token]}) is not in its support.")
            collected.append((np.array([logprob for logprob, _ in recorded]), rows))
        return collected


@contextlib.contextmanager
def recording_batches(model: Any, recorder: BatchRecorder, config: Any) -> Iterator[None]:
    """While the block runs, `model.generate_batch` hands the final scores of each batch to `recorder`.

    Args:
        model: the `PreTrainedModel` whose `generate_batch` runs (under PEFT: the base model).
        recorder: what records.
        config: the `ContinuousBatchingConfig` that it runs with. Graphs are off, since a captured one does not call the
            recorder, and so is asynchronous batching, with which the next batch is drawn before this one is updated.
    """
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

    build_processors, generate, update = (
        model._get_logits_processor,
        model.generate_batch,
        ContinuousBatchProcessor.update_batch,
    )

    def processors_with_recorder(*args: Any, **kwargs: Any) -> Any:
        processors = build_processors(*args, **kwargs)
        processors.append(recorder)
        return processors

    def told_update(processor: Any) -> None:
        # Rows are the requests with a new token, in the batch's order; not every token is kept.
        batch = [future.state for future in processor.inputs_and_outputs.requests_in_batch if future.has_new_token]
        lengths = [len(state.generated_tokens) for state in batch]
        update(processor)
        for row, (state, length) in enumerate(zip(batch, lengths, strict=True)):
            if len(state.generated_tokens) > length:
                recorder.drawn(state.request_id, row, state.generated_tokens[-1])

    def told_generate(inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        outputs = generate(inputs, *args, **kwargs)
        failed = [output.error for output in outputs.values() if output.error is not None]
        if failed or len(outputs) != len(inputs):
            reason = failed[0] if failed else "its log says why"
            raise SupportCaptureError(
                f"Continuous batching finished {len(outputs) - len(failed)} of {len(inputs)} requests: {reason}."
            )
        recorder.requests = list(outputs)
        return outputs

    model._get_logits_processor, model.generate_batch = processors_with_recorder, told_generate
    try:
        with (
            rebound(ContinuousBatchProcessor, update_batch=told_update),
            rebound(config, use_cuda_graph=False, use_async_batching=False),
        ):
            yield
    finally:
        del model._get_logits_processor, model.generate_batch
