"""Logits that a sampler has shifted by a known function of the tokens so far: penalties and biases.

    z' = r(z + bias) - penalty        r(x) = x / factor for x > 0, and x * factor otherwise

with `z` the logits after scale and softcap, before temperature, and before the sampler truncates. The bias comes first,
then the repetition penalty `factor`, then presence and frequency penalty. This is the order of vLLM, and that of
transformers for the two of these that it has.
"""

from __future__ import annotations

from dataclasses import dataclass

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
