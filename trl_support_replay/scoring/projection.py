"""What a head's projection reads, what it hands back in backward, and the step from projection to logit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .precision import compute_dtype


class Projection(NamedTuple):
    """Inputs of the projection `hidden @ weight.T + low_rank @ lora_b.T + bias`.

    Attributes:
        hidden: `[N, H]`.
        weight: `[V_local, H]`.
        bias: `[V_local]` or `None`.
        low_rank: `[N, r]` or `None`, hidden states through the first LoRA factor, scaled.
        lora_b: `[V_local, r]` or `None`, the second LoRA factor.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    low_rank: torch.Tensor | None
    lora_b: torch.Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of sums and results."""
        return compute_dtype(self.hidden, self.weight)

    def at(self, tokens: torch.Tensor | slice) -> Projection:
        """The same for some of the tokens."""
        low_rank = None if self.low_rank is None else self.low_rank[tokens]
        return self._replace(hidden=self.hidden[tokens], low_rank=low_rank)


class Needs(NamedTuple):
    """Which gradients are wanted; fields as in `Projection`."""

    hidden: bool
    weight: bool
    bias: bool
    low_rank: bool
    lora_b: bool


@dataclass
class Gradients:
    """Gradients of a `Projection`, `None` where nothing was added yet.

    Those of `hidden`, `low_rank` and `bias` are in the dtype of sums, those of `weight` and `lora_b` in the parameter's
    own, so that no second matrix of that size is held.
    """

    needs: Needs
    hidden: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    low_rank: torch.Tensor | None = None
    lora_b: torch.Tensor | None = None

    def as_inputs(self, inputs: Projection) -> tuple[torch.Tensor | None, ...]:
        """In the order and the dtypes of the inputs."""
        grads = (self.hidden, self.weight, self.bias, self.low_rank, self.lora_b)
        return tuple(
            None if grad is None or x is None else grad.to(x.dtype) for grad, x in zip(grads, inputs, strict=True)
        )


def check_temperature(temperature: float) -> None:
    """Raises: ValueError: a temperature at which nothing is sampled."""
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature={temperature}: a sampled distribution has a temperature above 0.")


@dataclass(frozen=True)
class LogitTransform:
    """From projection to logit: `softcap * tanh(logit_scale * y / softcap) / temperature`."""

    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def __call__(self, projection: torch.Tensor) -> torch.Tensor:
        if self.softcap is None:
            return projection * (self.logit_scale / self.temperature)
        return torch.tanh(projection * (self.logit_scale / self.softcap)) * (self.softcap / self.temperature)

    def grad_(self, logits: torch.Tensor, grad_logits: torch.Tensor) -> torch.Tensor:
        """Turn the gradient of the logits into that of the projection, in place."""
        if self.softcap is not None:
            grad_logits *= 1 - (logits * (self.temperature / self.softcap)) ** 2
        return grad_logits.mul_(self.logit_scale / self.temperature)
