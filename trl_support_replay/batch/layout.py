"""Where the tokens of recorded completions stand in a padded batch: for training, audits and routes alike.

A batch has the ids `[B, S]`. Prompts are padded on the left, and completions fill the last `T` columns, padded on the
right. The token in column `c` is predicted by the hidden state of column `c - 1`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..scoring import SupportCSR
from ..scoring.plan import to_device
from ..scoring.shifts import CandidateShifts
from ..traces.columns import Trace
from ..traces.shifts import LogitShifts
from ..traces.support import SupportRows

_KEPT_PAIRS = 2**20
"""Layouts of more (token, candidate) pairs are made anew in each pass: a plan takes some 50 bytes per pair."""


@dataclass(frozen=True)
class ScoredPositions:
    """Tensors of a `BatchLayout`.

    Attributes:
        states: `[N]` int64, places in the flattened `[B * S]` of the hidden states that predict the scored tokens.
        sampled_ids: `[N]` int64, the tokens that were drawn there.
    """

    states: torch.Tensor
    sampled_ids: torch.Tensor


@dataclass(frozen=True)
class BatchLayout:
    """The scored tokens of one model call, with their supports.

    Attributes:
        shape: `(B, S)`.
        positions: where the `N` tokens stand, on the device.
        support: their `N` supports, with the plan by which they are scored.
    """

    shape: tuple[int, int]
    positions: ScoredPositions
    support: SupportCSR

    @classmethod
    def build(
        cls,
        samples: Sequence[Trace],
        shape: tuple[int, int],
        completion_length: int,
        device: torch.device,
        scored: Sequence[np.ndarray] | None = None,
    ) -> BatchLayout:
        """Align samples with a batch.

        Args:
            samples: `B` recorded completions.
            shape: `(B, S)` of the input ids.
            completion_length: `T`, number of completion columns.
            device: where the model runs.
            scored: places in each completion that are scored, rising; those that enter the loss by default.

        Raises:
            ValueError: another number of samples than of rows, or a completion with more tokens than columns.
        """
        num_samples, width = shape
        if len(samples) != num_samples:
            raise ValueError(f"{len(samples)} recorded samples for a batch of {num_samples} rows.")
        if scored is None:
            scored = [np.flatnonzero(sample.loss_mask) for sample in samples]
        for b, sample in enumerate(samples):
            if len(sample.completion_ids) > completion_length:
                raise ValueError(f"Sample {b} has {len(sample.completion_ids)} tokens in {completion_length} columns.")
        before = width - completion_length - 1  # the column that predicts the first completion token
        states = np.concatenate([b * width + before + places for b, places in enumerate(scored)])
        sampled = np.concatenate([s.completion_ids[places] for s, places in zip(samples, scored, strict=True)])
        positions = ScoredPositions(torch.from_numpy(states), torch.from_numpy(sampled.astype(np.int64)))
        rows = SupportRows.concatenate([s.supports[places] for s, places in zip(samples, scored, strict=True)])
        shifts = None
        if any(sample.shifts is not None for sample in samples):
            shifts = CandidateShifts.concatenate(
                [_shifts(s, places) for s, places in zip(samples, scored, strict=True)]
            )
        support = SupportCSR.from_numpy(rows.token_ids, rows.offsets, device, shifts)
        return cls((num_samples, width), to_device(positions, device), support)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """`[B, S - 1]` next-token scores: `[N]` values at their places, and zero elsewhere."""
        num_samples, width = self.shape
        grid = values.new_zeros(num_samples * width).index_copy(0, self.positions.states.to(values.device), values)
        return grid.view(num_samples, width)[:, :-1]


def _shifts(sample: Trace, places: np.ndarray) -> CandidateShifts:
    """The shifts of the candidates of some tokens of a completion."""
    rows = sample.supports
    of_all = (sample.shifts or LogitShifts()).of_request(
        sample.prompt_ids, sample.completion_ids, rows.token_ids, rows.offsets
    )
    chosen = np.zeros(len(rows), bool)
    chosen[places] = True
    return CandidateShifts(*of_all).take(np.flatnonzero(np.repeat(chosen, rows.sizes)))


class SampleBatch(list[Trace]):
    """The recorded completions of a batch, with the layouts of the model calls that score it.

    Each layout holds the plan of its supports. It is made once, and then serves every pass over the batch: old and
    reference policy, the losses of all iterations, and checks.
    """

    def __init__(self, samples: Iterable[Trace] = ()):
        super().__init__(samples)
        self._layouts: dict[tuple, BatchLayout] = {}

    @classmethod
    def of(cls, samples: Sequence[Trace]) -> SampleBatch:
        """`samples` themselves if they are a batch; else a new one, such as for what TRL has shuffled or split."""
        return samples if isinstance(samples, SampleBatch) else cls(samples)

    def layout(self, start: int, shape: tuple[int, int], completion_length: int, device: torch.device) -> BatchLayout:
        """The layout of a call with `shape[0]` of the samples, from sample `start` on; see `BatchLayout.build`."""
        samples = self[start : start + shape[0]]
        # Whoever puts other samples into the list, or changes what they mask, gets another layout. The samples are
        # compared by identity, and kept: the id of one that is gone may be that of the next.
        masks = tuple(sample.loss_mask.tobytes() for sample in samples)
        key = (*samples, masks, shape, completion_length, device)
        if key in self._layouts:
            return self._layouts[key]
        made = BatchLayout.build(samples, shape, completion_length, device)
        if len(made.support.token_ids) <= _KEPT_PAIRS:
            self._layouts[key] = made
        return made


def first_columns(samples: Sequence[Trace], width: int, completion_length: int) -> list[int]:
    """For each sample the column of its first prompt token, which is the number of padding columns on its left."""
    return [width - completion_length - len(sample.prompt_ids) for sample in samples]


def padded_batch(samples: Sequence[Trace]) -> tuple[np.ndarray, np.ndarray, int]:
    """Samples as one batch.

    Returns:
        Ids and attention mask, `[B, S]` int64, and the number `T` of completion columns, at least 1.
    """
    prompt = max(len(sample.prompt_ids) for sample in samples)
    completion = max(1, *(len(sample.completion_ids) for sample in samples))
    ids = np.zeros((len(samples), prompt + completion), np.int64)
    mask = np.zeros_like(ids)
    for b, (sample, first) in enumerate(zip(samples, first_columns(samples, *ids.shape[1:], completion), strict=True)):
        row = np.concatenate([sample.prompt_ids, sample.completion_ids])
        ids[b, first : first + len(row)] = row
        mask[b, first : first + len(row)] = 1
    return ids, mask, completion


def recorded_mask(samples: Sequence[Trace], shape: Sequence[int]) -> torch.Tensor:
    """`[B, T]` bool: loss-bearing tokens with a recorded support."""
    mask = np.zeros(tuple(shape), dtype=bool)
    for b, sample in enumerate(samples):
        mask[b, : len(sample.loss_mask)] = sample.loss_mask & (sample.supports.sizes > 0)
    return torch.from_numpy(mask)
