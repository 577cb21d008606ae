"""`RecordedGaps`: recorded and replayed log-probs of a batch as flat arrays, with sums over all processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..traces.columns import Trace

SumRow = Callable[[list[float]], np.ndarray]
"""Sums a list of numbers over processes, element by element."""


@dataclass(frozen=True)
class RecordedGaps:
    """The `N` tokens of this process that have a recorded support, one sequence after another.

    Attributes:
        replayed, recorded: `[N]` float64 log-probs.
        sequence: `[N]` int64, index of each token's sequence, rising.
        position: `[N]` int64, place in the completion, rising within a sequence.
        sizes: `[N]` int64, size of each support.
        later_turn: `[N]` bool, whether tokens that nobody sampled stand before it in its completion.
        sums: over processes.
    """

    replayed: np.ndarray
    recorded: np.ndarray
    sequence: np.ndarray
    position: np.ndarray
    sizes: np.ndarray
    later_turn: np.ndarray
    sums: SumRow

    @classmethod
    def of(
        cls,
        samples: Sequence[Trace],
        sequence: np.ndarray,
        position: np.ndarray,
        replayed: np.ndarray,
        recorded: np.ndarray,
        sums: SumRow,
    ) -> RecordedGaps:
        """Add the sizes of supports and the turns, which are read from the completions."""
        sizes, later_turn = np.zeros(len(sequence), dtype=np.int64), np.zeros(len(sequence), dtype=bool)
        for b, sample in enumerate(samples):
            here = sequence == b
            sizes[here] = sample.supports.sizes[position[here]]
            later_turn[here] = np.cumsum(~sample.loss_mask)[position[here]] > 0
        return cls(replayed, recorded, sequence, position, sizes, later_turn, sums)

    @classmethod
    def of_batch(
        cls,
        samples: Sequence[Trace],
        replayed: torch.Tensor,
        recorded: torch.Tensor,
        mask: torch.Tensor,
        gather: Callable[[torch.Tensor], torch.Tensor],
    ) -> RecordedGaps:
        """From padded `[B, T]` log-probs.

        Args:
            samples: the `B` completions.
            replayed, recorded: `[B, T]` log-probs.
            mask: `[B, T]` bool, the tokens with a recorded support.
            gather: concatenates a `[1, n]` tensor over processes along dim 0.
        """

        def sums(values: list[float]) -> np.ndarray:
            dtype = torch.float32 if mask.device.type == "mps" else torch.float64
            return gather(torch.tensor([values], dtype=dtype, device=mask.device)).cpu().double().sum(dim=0).numpy()

        sequence, position = (index.cpu().numpy() for index in mask.nonzero(as_tuple=True))
        return cls.of(samples, sequence, position, flat(replayed, mask), flat(recorded, mask), sums)

    def mean(self, difference: np.ndarray) -> tuple[float, int]:
        """Mean absolute value over all processes, and the number of values."""
        total, count = self.sums([float(np.abs(difference).sum()), float(len(difference))]).tolist()
        return total / max(count, 1.0), int(count)


def flat(values: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    """`[N]` float64, the values of `[B, T]` where `mask` is set."""
    return values.detach()[mask].cpu().double().numpy()
