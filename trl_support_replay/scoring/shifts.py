"""Logits that a sampler has shifted by a known function of the tokens so far: penalties and biases.

    z' = r(z + bias) - penalty        r(x) = x / factor for x > 0, and x * factor otherwise

with `z` the logits after scale and softcap, before temperature, and before the sampler truncates. The bias comes first,
then the repetition penalty `factor`, then presence and frequency penalty. This is the order of vLLM, and that of
transformers for the two of these that it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class CandidateShifts:
    """What was done to the logit of each candidate, as the formula of this module names it.

    Attributes:
        bias: `[nnz]` float64, added first.
        factor: `[nnz]` float64 above 0, the repetition penalty; 1 where the token was not seen before.
        penalty: `[nnz]` float64, subtracted last.
    """

    bias: np.ndarray
    factor: np.ndarray
    penalty: np.ndarray

    def __post_init__(self) -> None:
        shapes = {array.shape for array in (self.bias, self.factor, self.penalty)}
        if len(shapes) > 1 or self.bias.ndim != 1:
            raise ValueError(f"Shifts need three arrays [nnz] of one length, not shapes {sorted(shapes)}.")
        if not all(np.isfinite(array).all() for array in (self.bias, self.factor, self.penalty)):
            raise ValueError("Shifts are finite. A token that a sampler removes is left out of the support.")
        if (self.factor <= 0).any():
            raise ValueError(f"A repetition penalty is above 0, not {self.factor.min()}.")

    def __len__(self) -> int:
        return len(self.bias)

    def take(self, places: np.ndarray) -> CandidateShifts:
        """The shifts of some candidates.

        Args:
            places: `[n]` integers.
        """
        return CandidateShifts(self.bias[places], self.factor[places], self.penalty[places])

    @classmethod
    def concatenate(cls, parts: list[CandidateShifts]) -> CandidateShifts:
        """The candidates of several parts, one part after another."""
        names = ("bias", "factor", "penalty")
        return cls(*(np.concatenate([np.empty(0), *(getattr(part, name) for part in parts)]) for name in names))

    def on_pairs(self, places: np.ndarray) -> PairShifts:
        """The shifts in the order of a plan's pairs.

        Args:
            places: `[P]` integers, the candidate of each pair.
        """
        return PairShifts(torch.from_numpy(np.stack([self.bias, self.factor, self.penalty])[:, places]))


@dataclass(frozen=True)
class PairShifts:
    """The shifts of the pairs of a plan.

    Attributes:
        values: `[3, P]` float64, bias, factor and penalty.
    """

    values: torch.Tensor

    def __call__(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        """`[P]` shifted logits, of logits that are divided by the temperature already, as the result is.

        Dividing by a temperature above 0 commutes with the repetition penalty. Autograd differentiates this step.
        """
        bias, factor, penalty = self.values.to(logits.dtype)
        logits = logits + bias / temperature
        return torch.where(logits > 0, logits / factor, logits * factor) - penalty / temperature


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
    ) -> CandidateShifts:
        """The shifts of the candidates of one request.

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
        return CandidateShifts(
            bias=bias,
            factor=np.where(seen, self.repetition_penalty, 1.0),
            penalty=self.frequency_penalty * count + self.presence_penalty * (count > 0),
        )
