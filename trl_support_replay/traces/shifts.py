"""Settings of a request that shift logits, and what they do to each candidate: a function of the tokens alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .errors import TraceSchemaError


@dataclass(frozen=True)
class LogitShifts:
    """The settings of a request that shift logits, with vLLM's names.

    Attributes:
        repetition_penalty: divides positive logits, and multiplies others, of tokens in the prompt or in the output.
        presence_penalty: subtracted once from the logit of a token that is in the output.
        frequency_penalty: subtracted for each time that a token is in the output.
        logit_bias: added to the logits of some token ids.

    Raises:
        ValueError: a value that is not finite, or a repetition penalty that is not above 0; naming the setting.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            if not math.isfinite(value := getattr(self, name)):
                raise ValueError(f"{name}={value} is not finite. Give a finite number.")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} is not above 0. 1 is off.")
        for token, bias in self.logit_bias.items():
            if not math.isfinite(bias):
                raise ValueError(f"logit_bias={{{token}: {bias}}} is not finite. -inf removes a token; it shifts none.")

    def of_request(
        self, prompt_ids: np.ndarray, output_ids: np.ndarray, token_ids: np.ndarray, offsets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bias, factor and penalty of the candidates of one request, `[nnz]` each, as `scoring.shifts` has them.

        They follow from the tokens, so nothing beside the tokens has to be recorded. What counts as the prompt is all
        that the engine was given. In a conversation that includes the output of earlier requests. In transformers the
        padding on the left of a prompt counts as well: pass it with the prompt.

        Args:
            prompt_ids: `[M]` integers, what the engine was given.
            output_ids: `[T]` integers, what the request has generated.
            token_ids: `[nnz]` integers, candidates of the `T` output tokens.
            offsets: `[T + 1]` integers, the candidates of token `t` are `token_ids[offsets[t]:offsets[t + 1]]`.

        Raises:
            ValueError: another number of rows than of output tokens.
        """
        length = len(output_ids)
        if len(offsets) != length + 1:
            raise ValueError(f"{len(offsets) - 1} supports for {length} output tokens.")
        ids = np.asarray(token_ids, dtype=np.int64)
        rows = np.repeat(np.arange(length), np.diff(offsets))
        # Sorted by id, then by place: the earlier places of an id are the run between two places of this array.
        drawn = np.sort(np.asarray(output_ids, dtype=np.int64) * (length + 1) + np.arange(length))
        count = np.searchsorted(drawn, ids * (length + 1) + rows) - np.searchsorted(drawn, ids * (length + 1))
        seen = (count > 0) | np.isin(ids, prompt_ids)
        bias = np.zeros(len(ids))
        for token, value in self.logit_bias.items():
            bias[ids == int(token)] = value
        factor = np.where(seen, self.repetition_penalty, 1.0)
        return bias, factor, self.frequency_penalty * count + self.presence_penalty * (count > 0)


def check_unshifted(traces: Iterable[Any], lack: str) -> None:
    """Refuse traces whose logits were shifted, where they would be scored without.

    Args:
        lack: what does not know of shifts, for the error.

    Raises:
        TraceSchemaError: naming the trace and its settings.
    """
    for i, trace in enumerate(traces):
        if trace.shifts is not None:
            raise TraceSchemaError(
                f"Trace {i} was sampled with {trace.shifts}, and {lack}: the trace would be scored without. Sample "
                "without penalties and biases."
            )
