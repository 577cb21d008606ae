"""`SupportCSR`: the candidates of each token, on a device, with the plan by which they are projected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .plan import CandidatePlan, check_unique, make_plan, to_device


@dataclass(frozen=True, eq=False)
class SupportCSR:
    """Supports of `N` tokens in compressed sparse rows, on the device that scores them.

    Scoring follows a plan that is made from host arrays, so that no step of training waits for the device. Build it
    with [`SupportCSR.from_numpy`]; one built from device tensors alone copies them to the host once.

    Attributes:
        token_ids: `[nnz]` int32 or int64, candidate ids, each at most once in a row.
        offsets: `[N + 1]` int64, row `i` is `token_ids[offsets[i]:offsets[i + 1]]`. An empty row has no recorded
            support.
    """

    token_ids: torch.Tensor
    offsets: torch.Tensor
    _host: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    _plans: dict[tuple[int, int, str], CandidatePlan] = field(default_factory=dict, repr=False)

    @classmethod
    def from_numpy(cls, token_ids: Any, offsets: Any, device: torch.device | str = "cpu") -> SupportCSR:
        """Supports from host arrays.

        Args:
            token_ids: `[nnz]` integers.
            offsets: `[N + 1]` integers from 0 to `nnz`, never falling.
            device: where the scores will be computed.

        Raises:
            ValueError: offsets that do not start at 0, fall somewhere, or do not end at `nnz`; ids or offsets that are
                not integers.
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
        return cls(to_device(ids, device), to_device(ends, device), _host={"token_ids": ids, "offsets": ends})

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> SupportCSR:
        """Supports from one list of ids a token."""
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        ids = np.fromiter((v for row in rows for v in row), dtype=np.int64, count=int(offsets[-1]))
        return cls.from_numpy(ids, offsets, device)

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def device(self) -> torch.device:
        return self.token_ids.device

    @property
    def host_token_ids(self) -> np.ndarray:
        if "token_ids" not in self._host:
            self._host["token_ids"] = self.token_ids.cpu().numpy()
        return self._host["token_ids"]

    @property
    def host_offsets(self) -> np.ndarray:
        if "offsets" not in self._host:
            self._host["offsets"] = self.offsets.cpu().numpy()
        return self._host["offsets"]

    def take(self, rows: np.ndarray) -> SupportCSR:
        """The rows at some indices, in their order.

        Args:
            rows: host integers.
        """
        starts, sizes = self.host_offsets[rows], np.diff(self.host_offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        source = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], sizes)
        return SupportCSR.from_numpy(self.host_token_ids[source], offsets, self.device)

    def to(self, device: torch.device | str) -> SupportCSR:
        """The same supports on another device."""
        if torch.device(device) == self.device:
            return self
        return SupportCSR.from_numpy(self.host_token_ids, self.host_offsets, device)

    def validate(self, sampled_ids: Any, vocab_size: int) -> None:
        """Check on the host that these are supports of these tokens. Rows without recorded support pass.

        Args:
            sampled_ids: `[N]` integers, the token drawn from each row. Host arrays; device tensors are copied.
            vocab_size: rows of the whole output head.

        Raises:
            ValueError: another number of tokens than rows, an id outside the vocabulary, an id twice in a row, or a
                row without its sampled token.
        """
        sampled = sampled_ids.cpu().numpy() if isinstance(sampled_ids, torch.Tensor) else np.asarray(sampled_ids)
        if sampled.shape != (len(self),):
            raise ValueError(f"{len(self)} supports for sampled_ids of shape {sampled.shape}.")
        ids, offsets = self.host_token_ids.astype(np.int64), self.host_offsets
        rows = np.repeat(np.arange(len(self)), np.diff(offsets))
        self.check_range(vocab_size)
        outside = np.flatnonzero((sampled < 0) | (sampled >= vocab_size))
        if len(outside):
            raise ValueError(
                f"sampled_ids[{outside[0]}] = {sampled[outside[0]]}; the head has ids 0 to {vocab_size - 1}."
            )
        check_unique(rows, ids)
        hits = np.zeros(len(self), bool)
        hits[rows[ids == sampled[rows]]] = True
        missing = np.flatnonzero(~hits & (np.diff(offsets) > 0))
        if len(missing):
            row = missing[0]
            size = offsets[row + 1] - offsets[row]
            raise ValueError(
                f"Token {row} was sampled as id {sampled[row]}, which is not among the {size} ids of its support; so "
                f"for {len(missing)} of {len(self)} tokens. Supports and tokens are shifted "
                "against each other, or the support was recorded under other sampling settings."
            )

    def check_range(self, vocab_size: int) -> None:
        """Check on the host that the head has all candidates.

        Args:
            vocab_size: rows of the whole output head.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        ids = self.host_token_ids
        outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if len(outside):
            row = np.searchsorted(self.host_offsets, outside[0], side="right") - 1
            raise ValueError(f"Support row {row} has id {ids[outside[0]]}; the head has ids 0 to {vocab_size - 1}.")

    def plan(self, start: int, stop: int, kernel: str) -> CandidatePlan:
        """The pairs whose candidate lies in `[start, stop)`, for one kind of product; made once, then kept.

        Raises:
            ValueError: an id twice in a row.
        """
        key = (start, stop, kernel)
        if key not in self._plans:
            self._plans[key] = make_plan(
                self.host_token_ids, self.host_offsets, start, stop, kernel=kernel, device=self.device
            )
        return self._plans[key]
