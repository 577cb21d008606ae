"""`SupportCSR`: the candidates of each token, with the plan by which they are projected."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from .plan import CandidatePlan, make_plan, to_device
from .shifts import CandidateShifts


@dataclass(frozen=True, eq=False)
class SupportCSR:
    """Supports of `N` tokens in compressed sparse rows: host arrays, and a device that scores them.

    Scoring follows a plan that is made from the host arrays when it is first needed, and then kept: keep the object for
    as long as the same tokens are scored. Build it with [`SupportCSR.from_numpy`].

    Attributes:
        token_ids: `[nnz]` int32 or int64, candidate ids, each at most once in a row.
        offsets: `[N + 1]` int64, row `i` is `token_ids[offsets[i]:offsets[i + 1]]`. An empty row has no recorded
            support.
        device: where the scores will be computed.
        shifts: what the sampler did to the logits of the candidates; `None` for nothing. Whatever scores these supports
            does the same to the logits of the policy.
    """

    token_ids: np.ndarray
    offsets: np.ndarray
    device: torch.device
    shifts: CandidateShifts | None = None
    _plans: dict[tuple[int, int, str], CandidatePlan] = field(default_factory=dict, repr=False)

    @classmethod
    def from_numpy(
        cls,
        token_ids: Any,
        offsets: Any,
        device: torch.device | str = "cpu",
        shifts: CandidateShifts | None = None,
    ) -> SupportCSR:
        """Supports from host arrays, which are not copied.

        Args:
            token_ids: `[nnz]` integers.
            offsets: `[N + 1]` integers from 0 to `nnz`, never falling.
            device: where the scores will be computed.
            shifts: of the `nnz` candidates' logits, where the sampler shifted them.

        Raises:
            ValueError: offsets that do not start at 0, fall somewhere, or do not end at `nnz`; ids or offsets that are
                not integers; another number of shifts than of ids.
        """
        ids, ends = np.asarray(token_ids), np.asarray(offsets)
        for name, array in (("token_ids", ids), ("offsets", ends)):
            if array.size and array.dtype.kind not in "iu":
                raise ValueError(f"{name} has the data type {array.dtype}; integers are needed.")
        if ids.dtype not in (np.int32, np.int64):
            ids = ids.astype(np.int64)
        ends = ends.astype(np.int64, copy=False)
        if ids.ndim != 1 or ends.ndim != 1 or len(ends) == 0:
            raise ValueError(
                f"Supports need token_ids [nnz] and offsets [N + 1], not shapes {ids.shape} and {ends.shape}."
            )
        if ends[0] != 0 or ends[-1] != len(ids):
            raise ValueError(f"offsets run from {ends[0]} to {ends[-1]}; {len(ids)} token ids need 0 to {len(ids)}.")
        falls = np.flatnonzero(np.diff(ends) < 0)
        if len(falls):
            raise ValueError(f"offsets fall from {ends[falls[0]]} to {ends[falls[0] + 1]} at row {falls[0]}.")
        if shifts is not None and len(shifts) != len(ids):
            raise ValueError(f"{len(shifts)} shifts for {len(ids)} token ids.")
        return cls(ids, ends, torch.device(device), shifts)

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> SupportCSR:
        """Supports from one list of ids per token."""
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        ids = np.fromiter((v for row in rows for v in row), dtype=np.int64, count=int(offsets[-1]))
        return cls.from_numpy(ids, offsets, device)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @functools.cached_property
    def num_empty(self) -> int:
        """Rows without recorded support."""
        return int((np.diff(self.offsets) == 0).sum())

    @functools.cached_property
    def by_union(self) -> tuple[np.ndarray, torch.Tensor, SupportCSR]:
        """The sorted distinct ids (int64, on the host and on the device), and the rows as places among them."""
        ids, places = np.unique(self.token_ids, return_inverse=True)
        ids = ids.astype(np.int64)
        union = to_device(torch.from_numpy(ids), self.device)
        return ids, union, SupportCSR(places, self.offsets, self.device, self.shifts)

    def take(self, rows: np.ndarray) -> SupportCSR:
        """The rows at some indices, in their order.

        Args:
            rows: host integers.
        """
        starts, sizes = self.offsets[rows], np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        source = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], sizes)
        shifts = None if self.shifts is None else self.shifts.take(source)
        return SupportCSR.from_numpy(self.token_ids[source], offsets, self.device, shifts)

    def to(self, device: torch.device | str) -> SupportCSR:
        """The same supports for another device."""
        device = torch.device(device)
        return self if device == self.device else SupportCSR(self.token_ids, self.offsets, device, self.shifts)

    def explain(self, sampled_ids: torch.Tensor, vocab_size: int | None) -> None:
        """Say which token was not sampled from its row, when scoring has found that one was not.

        Args:
            sampled_ids: `[N]` integers on the host, the token drawn from each row.
            vocab_size: rows of the whole output head, where this process knows them.

        Raises:
            ValueError: a sampled id outside the vocabulary, or a row without its sampled token.
        """
        sampled, sizes = sampled_ids.numpy(), np.diff(self.offsets)
        if vocab_size is not None and len(outside := np.flatnonzero((sampled < 0) | (sampled >= vocab_size))):
            raise ValueError(
                f"sampled_ids[{outside[0]}] = {sampled[outside[0]]}; the head has ids 0 to {vocab_size - 1}."
            )
        rows = np.repeat(np.arange(len(self)), sizes)
        hits = np.zeros(len(self), bool)
        hits[rows[self.token_ids == sampled[rows]]] = True
        missing = np.flatnonzero(~hits & (sizes > 0))
        if len(missing):
            row = missing[0]
            raise ValueError(
                f"Token {row} was sampled as id {sampled[row]}, which is not among the {sizes[row]} ids of its "
                f"support; so for {len(missing)} of {len(self)} tokens. Supports and tokens are shifted "
                "against each other, or the support was recorded under other sampling settings."
            )

    @functools.cached_property
    def _extremes(self) -> tuple[int, int]:
        return (int(self.token_ids.min()), int(self.token_ids.max())) if len(self.token_ids) else (0, -1)

    def check_range(self, vocab_size: int) -> None:
        """Check on the host that the head has all candidates.

        Args:
            vocab_size: rows of the whole output head.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        least, largest = self._extremes
        if least < 0 or largest >= vocab_size:
            first = np.flatnonzero((self.token_ids < 0) | (self.token_ids >= vocab_size))[0]
            row = np.searchsorted(self.offsets, first, side="right") - 1
            raise ValueError(
                f"Support row {row} has id {self.token_ids[first]}; the head has ids 0 to {vocab_size - 1}."
            )

    def plan(self, start: int, stop: int, kernel: str) -> CandidatePlan:
        """The pairs whose candidate lies in `[start, stop)`, for one kind of product; made once, then kept.

        Raises:
            ValueError: an id twice in a row.
        """
        key = (start, stop, kernel)
        if key not in self._plans:
            plan = make_plan(self.token_ids, self.offsets, start, stop, kernel=kernel, device=self.device)
            if self.shifts is not None:
                shifts = self.shifts.on_pairs(self.places_of(plan, start))
                plan = replace(plan, shifts=to_device(shifts, self.device))
            self._plans[key] = plan
        return self._plans[key]

    def places_of(self, plan: CandidatePlan, start: int) -> np.ndarray:
        """`[P]` int64, where the pairs of a plan of this object stand in `token_ids`.

        Args:
            start: the first id of the plan's part of the vocabulary.
        """
        bits = int(self.token_ids.max(initial=1)).bit_length()
        keys = np.repeat(np.arange(len(self)) << bits, np.diff(self.offsets)) | self.token_ids.astype(np.int64)
        order = np.argsort(keys, kind="stable")
        return order[np.searchsorted(keys[order], plan.pair_tokens << bits | (plan.host_pair_ids + start))]
