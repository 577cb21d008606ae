"""`RoutedExperts`: which experts of a mixture-of-experts model each token was routed to, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class RoutesError(ValueError):
    """Recorded routes that no router could have produced, or that do not fit the tokens or the model."""


def route_dtype(num_experts: int) -> np.dtype:
    """The smallest of uint8, uint16 and int32 that holds the expert ids `0 … num_experts - 1`."""
    if num_experts < 1:
        raise RoutesError(f"num_experts={num_experts}: a router has at least one expert.")
    if num_experts <= 1 << 8:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16) if num_experts <= 1 << 16 else np.dtype(np.int32)


class RoutedExperts:
    """Expert ids of `T` tokens in the `L` mixture-of-experts layers of a model, `k` for each token and layer.

    A token whose routing the engine did not report (the last token of a generation never enters the model; an
    observation may be new) is *uncaptured*: its row holds zeros that mean nothing, and replay leaves it to the live
    router.

    Slices are views: only what is used is ever widened (`to_int64`).

    Args:
        experts: `[T, L, k]` integer expert ids; the order within a token's `k` is the engine's.
        num_experts: number of experts of each of these layers, `E`.
        layers: the global layer number of each of the `L` columns, strictly increasing. Dense layers of a mixed model
            have no column. Default: `0 … L - 1`.
        captured: bool `[T]`, or `None` for "every token".
        where: how to call these routes in errors, for example the request's name.

    Attributes:
        experts: `[T, L, k]` in the smallest of uint8, uint16 and int32.
        captured: bool `[T]`.
        layers: tuple of `L` global layer numbers.
        num_experts: `E`.

    Raises:
        RoutesError: wrong shapes or types, an id outside `0 … E - 1`, or one expert twice in a token's `k`, which is
            what rows that were never written (all zeros) look like when `k > 1`.
    """

    __slots__ = ("experts", "captured", "layers", "num_experts")

    experts: np.ndarray
    captured: np.ndarray
    layers: tuple[int, ...]
    num_experts: int

    def __init__(
        self,
        experts: Any,
        *,
        num_experts: int,
        layers: Sequence[int] | None = None,
        captured: Any = None,
        where: str = "routes",
    ) -> None:
        experts = np.asarray(experts)
        if experts.ndim != 3:
            raise RoutesError(f"{where}: shape {experts.shape} is not [tokens, layers, top_k].")
        if experts.dtype.kind not in "iu":
            raise RoutesError(f"{where}: expert ids of type {experts.dtype} are not integers.")
        num_tokens, num_layers, top_k = experts.shape
        layers = tuple(range(num_layers)) if layers is None else tuple(int(layer) for layer in layers)
        if len(layers) != num_layers:
            raise RoutesError(f"{where}: {num_layers} layer columns, but {len(layers)} layer numbers {layers}.")
        if any(a >= b for a, b in zip((-1, *layers), layers, strict=False)):
            raise RoutesError(f"{where}: layer numbers {layers} are not strictly increasing from 0 up.")
        if not 1 <= top_k <= num_experts:
            raise RoutesError(f"{where}: top_k={top_k} does not fit num_experts={num_experts}.")
        if captured is None:
            captured = np.ones(num_tokens, dtype=bool)
        captured = np.asarray(captured)
        if captured.dtype != bool or captured.shape != (num_tokens,):
            raise RoutesError(
                f"{where}: the captured mask is {captured.dtype} {captured.shape}, not bool ({num_tokens},)."
            )
        if not captured.all():
            experts = np.where(captured[:, None, None], experts, 0)
        _check_range(experts, layers, num_experts, where)
        narrow = np.ascontiguousarray(experts, dtype=route_dtype(num_experts))
        _check_distinct(narrow, captured, layers, where)
        self._set(narrow, captured, layers, num_experts)

    def _set(self, experts: np.ndarray, captured: np.ndarray, layers: tuple[int, ...], num_experts: int) -> None:
        self.experts = experts
        self.captured = captured
        self.layers = layers
        self.num_experts = num_experts

    def _like(self, experts: np.ndarray, captured: np.ndarray) -> RoutedExperts:
        new = object.__new__(RoutedExperts)
        new._set(experts, captured, self.layers, self.num_experts)
        return new

    @classmethod
    def from_prefix(
        cls,
        experts: Any,
        num_tokens: int,
        *,
        num_experts: int,
        layers: Sequence[int] | None = None,
        where: str = "routes",
    ) -> RoutedExperts:
        """Routes of the first rows of `num_tokens` tokens; the rest is uncaptured.

        Engines return `prompt + generated - 1` rows, since the last sampled token is never fed back.

        Args:
            experts: `[n, L, k]` with `n <= num_tokens`.
            num_tokens: `T`.
        """
        rows = cls(experts, num_experts=num_experts, layers=layers, where=where)
        if len(rows) > num_tokens:
            raise RoutesError(f"{where}: {len(rows)} rows of routes for {num_tokens} tokens.")
        indices = np.full(num_tokens, -1, dtype=np.int64)
        indices[: len(rows)] = np.arange(len(rows))
        return rows.take(indices)

    @classmethod
    def empty(cls, num_tokens: int, *, layers: Sequence[int], top_k: int, num_experts: int) -> RoutedExperts:
        """`num_tokens` uncaptured tokens."""
        zeros = np.zeros((num_tokens, len(layers), top_k), dtype=route_dtype(num_experts))
        return cls(zeros, num_experts=num_experts, layers=layers, captured=np.zeros(num_tokens, dtype=bool))

    @classmethod
    def concatenate(cls, parts: Sequence[RoutedExperts]) -> RoutedExperts:
        """Tokens of several parts, in order.

        Raises:
            RoutesError: no parts, or parts of other layers, top-k or number of experts than the first.
        """
        if not parts:
            raise RoutesError("No routes to concatenate: layers and top_k of the result would be unknown.")
        first = parts[0]
        for i, part in enumerate(parts):
            part.check(
                layers=first.layers, top_k=first.top_k, num_experts=first.num_experts, where=f"part {i} of {len(parts)}"
            )
        return first._like(
            np.concatenate([part.experts for part in parts]), np.concatenate([part.captured for part in parts])
        )

    @property
    def top_k(self) -> int:
        """Experts per token and layer, `k`."""
        return self.experts.shape[2]

    @property
    def captured_prefix(self) -> int:
        """Number of captured tokens before the first uncaptured one."""
        return len(self) if self.captured.all() else int(np.argmin(self.captured))

    def to_int64(self) -> np.ndarray:
        """`[T, L, k]` int64 ids, as index operations want them. Slice first: this copies."""
        return self.experts.astype(np.int64)

    def take(self, indices: Any, missing: int = -1) -> RoutedExperts:
        """The tokens at `indices` `[M]`, in that order; `missing` gives an uncaptured token.

        Raises:
            RoutesError: an index outside the tokens, or indices that are not one-dimensional.
        """
        indices = np.asarray(indices, dtype=np.int64)
        if indices.ndim != 1:
            raise RoutesError(f"Token indices of shape {indices.shape} are not [tokens].")
        absent = indices == missing
        wrong = ~absent & ((indices < 0) | (indices >= len(self)))
        if wrong.any():
            raise RoutesError(f"Token index {int(indices[wrong][0])} is outside {len(self)} rows of routes.")
        if not absent.any():
            return self._like(self.experts[indices], self.captured[indices])
        experts = np.zeros((len(indices), *self.experts.shape[1:]), dtype=self.experts.dtype)
        captured = np.zeros(len(indices), dtype=bool)
        experts[~absent] = self.experts[indices[~absent]]
        captured[~absent] = self.captured[indices[~absent]]
        return self._like(experts, captured)

    def check(
        self,
        *,
        num_tokens: int | None = None,
        layers: Sequence[int] | None = None,
        top_k: int | None = None,
        num_experts: int | None = None,
        where: str = "routes",
    ) -> None:
        """Raise `RoutesError`, naming both numbers, unless the routes have exactly these dimensions."""
        wanted = {"tokens": num_tokens, "layers": layers, "top_k": top_k, "experts": num_experts}
        have = {"tokens": len(self), "layers": self.layers, "top_k": self.top_k, "experts": self.num_experts}
        for name, want in wanted.items():
            if want is not None and have[name] != (tuple(want) if name == "layers" else want):  # type: ignore[arg-type]
                raise RoutesError(f"{where}: recorded {name} {have[name]}, expected {want}.")

    def __len__(self) -> int:
        return len(self.experts)

    def __getitem__(self, tokens: slice) -> RoutedExperts:
        """The tokens of a slice, as a view; `take` gives any others."""
        if not isinstance(tokens, slice):
            raise TypeError(f"Tokens are selected by a slice, or by `take`, not by {tokens!r}.")
        return self._like(self.experts[tokens], self.captured[tokens])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutedExperts):
            return NotImplemented
        return (
            self.layers == other.layers
            and self.num_experts == other.num_experts
            and np.array_equal(self.experts, other.experts)
            and np.array_equal(self.captured, other.captured)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"RoutedExperts(tokens={len(self)}, captured={int(self.captured.sum())}, layers={self.layers}, "
            f"top_k={self.top_k}, num_experts={self.num_experts}, dtype={self.experts.dtype})"
        )


def _check_range(experts: np.ndarray, layers: tuple[int, ...], num_experts: int, where: str) -> None:
    if not experts.size or (int(experts.min()) >= 0 and int(experts.max()) < num_experts):
        return
    token, column, slot = np.argwhere((experts < 0) | (experts >= num_experts))[0]
    raise RoutesError(
        f"{where}: token {token}, layer {layers[column]}: expert {int(experts[token, column, slot])} is outside "
        f"0 … {num_experts - 1}."
    )


def _check_distinct(experts: np.ndarray, captured: np.ndarray, layers: tuple[int, ...], where: str) -> None:
    if experts.shape[2] < 2 or not experts.size:
        return
    ordered = np.sort(experts, axis=2)
    twice = (ordered[:, :, 1:] == ordered[:, :, :-1]) & captured[:, None, None]
    if twice.any():
        token, column, slot = np.argwhere(twice)[0]
        raise RoutesError(
            f"{where}: token {token}, layer {layers[column]}: expert {int(ordered[token, column, slot])} appears twice "
            f"in {experts[token, column].tolist()}. A router never picks an expert twice; rows of zeros are rows that "
            "the engine did not write."
        )
