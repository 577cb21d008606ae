"""What may ride along with tokens: the type, the width and the blank row of each kind of token-aligned data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np

from .routes import RoutedExperts
from .support import SupportRows

TokenData: TypeAlias = np.ndarray | SupportRows | RoutedExperts
"""One row a token. All three know their length, slice by tokens as views, and select by mask or integer array."""

Scope: TypeAlias = Literal["sampled", "sequence"]
"""Which tokens have rows of their own. "sampled": one row for each completion token, handed over with each sampled
turn; tokens that nobody sampled get blank rows. "sequence": one row for each token of prompt and completion, handed
over as the engine comes to know them, which for the last sampled token is the next turn."""


class TrajectoryError(ValueError):
    """Side data that does not fit its tokens, or a history that cannot have happened."""


class Field(Protocol):
    """One kind of token-aligned data."""

    @property
    def name(self) -> str: ...
    @property
    def scope(self) -> Scope: ...

    def check(self, values: Any, token_ids: np.ndarray, where: str) -> TokenData:
        """`values` as this field keeps them, if they are one proper row for each of `token_ids`."""
        ...

    def blank(self, num_tokens: int) -> TokenData:
        """Rows for tokens that have no data."""
        ...

    def join(self, chunks: Sequence[Any]) -> TokenData:
        """Rows of several chunks, in order."""
        ...


@dataclass(frozen=True)
class SupportField:
    """`SupportRows`: every sampled token's support, which holds that token.

    Args:
        vocab_size: rows of the language-model head, where known.
    """

    vocab_size: int | None = None
    name: ClassVar[str] = "support"
    scope: ClassVar[Scope] = "sampled"

    def check(self, values: Any, token_ids: np.ndarray, where: str) -> SupportRows:
        _check_type(values, SupportRows, where, self.name)
        _check_count(values, token_ids, where, self.name)
        values.validate(vocab_size=self.vocab_size, sampled_ids=token_ids, where=f"{where}: {self.name}")
        bare = values.sizes == 0
        if bare.any():
            row = int(np.argmax(bare))
            raise TrajectoryError(
                f"{where}: {int(bare.sum())} of {len(bare)} sampled tokens have an empty {self.name}, first row {row} "
                f"(id {token_ids[row]}). Only observations and a synthetic end of sequence go without."
            )
        return values

    def blank(self, num_tokens: int) -> SupportRows:
        return SupportRows.empty(num_tokens)

    def join(self, chunks: Sequence[SupportRows]) -> SupportRows:
        return SupportRows.concatenate(chunks)


@dataclass(frozen=True)
class RoutesField:
    """`RoutedExperts` of a model's mixture-of-experts layers, for prompt and completion; blank rows are uncaptured.

    Args:
        layers: global layer numbers.
        top_k: experts per token and layer.
        num_experts: experts per layer.
    """

    layers: tuple[int, ...]
    top_k: int
    num_experts: int
    name: ClassVar[str] = "routed_experts"
    scope: ClassVar[Scope] = "sequence"

    def check(self, values: Any, token_ids: np.ndarray, where: str) -> RoutedExperts:
        _check_type(values, RoutedExperts, where, self.name)
        _check_count(values, token_ids, where, self.name)
        values.check(layers=self.layers, top_k=self.top_k, num_experts=self.num_experts, where=f"{where}: {self.name}")
        return values

    def blank(self, num_tokens: int) -> RoutedExperts:
        return RoutedExperts.empty(num_tokens, layers=self.layers, top_k=self.top_k, num_experts=self.num_experts)

    def join(self, chunks: Sequence[RoutedExperts]) -> RoutedExperts:
        return RoutedExperts.concatenate(chunks) if chunks else self.blank(0)


@dataclass(frozen=True)
class ArrayField:
    """Any other array `[T, *shape]`.

    Args:
        name: its name; a keyword of `TrajectoryTrace.append_sampled`.
        dtype: exact element type. Nothing is converted: a float64 array for a float32 field is an error.
        shape: shape of one token's row.
        fill: value of blank rows.
        scope: see `Scope`.
    """

    name: str
    dtype: Any
    shape: tuple[int, ...] = ()
    fill: Any = field(kw_only=True)
    scope: Scope = "sampled"

    def check(self, values: Any, token_ids: np.ndarray, where: str) -> np.ndarray:
        _check_type(values, np.ndarray, where, self.name)
        _check_count(values, token_ids, where, self.name)
        if values.dtype != np.dtype(self.dtype):
            raise TrajectoryError(f"{where}: {self.name} has type {values.dtype}, not {np.dtype(self.dtype)}.")
        if values.shape[1:] != self.shape:
            raise TrajectoryError(f"{where}: {self.name} has rows of shape {values.shape[1:]}, not {self.shape}.")
        return values

    def blank(self, num_tokens: int) -> np.ndarray:
        return np.full((num_tokens, *self.shape), self.fill, dtype=self.dtype)

    def join(self, chunks: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([self.blank(0), *chunks])


def _check_type(values: Any, kind: type, where: str, name: str) -> None:
    if not isinstance(values, kind):
        raise TrajectoryError(f"{where}: {name} is a {type(values).__name__}, not a {kind.__name__}.")
    if isinstance(values, np.ndarray) and values.ndim == 0:
        raise TrajectoryError(f"{where}: {name} is a single number, not one row a token.")


def _check_count(values: Any, token_ids: np.ndarray, where: str, name: str) -> None:
    if len(values) != len(token_ids):
        raise TrajectoryError(f"{where}: {name} has {len(values)} rows for {len(token_ids)} tokens.")
