"""`TokenMetadataLayout`: where the tokens of some trajectories lie in a model's batch, and on which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from .candidates import SupportCSR

Values = TypeVar("Values", np.ndarray, torch.Tensor)


@dataclass(frozen=True)
class ScoredTokens:
    """The loss-bearing tokens that one rank scores.

    Attributes:
        positions: `[N]` int64, positions of the flattened local batch whose hidden states predict them.
        tokens: `[N]` int64, which of the layout's tokens they are.
        sampled_ids: `[N]` int64.
        support: `N` rows, on the host.
    """

    positions: np.ndarray
    tokens: np.ndarray
    sampled_ids: np.ndarray
    support: SupportCSR


@dataclass(frozen=True, eq=False)
class TokenMetadataLayout:
    """Places the tokens of `n` trajectories, numbered end to end from 0 to `T - 1`, in a batch of `[rows, columns]`.

    Whatever is known of each token (its support, its routes, whether it bears loss) is kept in token order, `[T, ...]`,
    whole trajectories at a time. The layout brings it into the order of the model's positions, on one rank of a context
    parallel group too, and scores back into token order. Make it whole, then take a rank's part:

        layout = TokenMetadataLayout.packed(lengths, multiple=2 * size).context_shard(size, rank, zigzag=True)
        scored = layout.scored_tokens(sampled_ids, token_ids, offsets, loss_mask)
        scores = score_support(hidden.flatten(0, 1)[scored.positions], head, ...)

    Attributes:
        lengths: `[n]`, tokens of each trajectory.
        token_at: `[rows, columns]` int64, the token at each position, -1 for padding.
        segments: end of each run of positions that context parallelism cuts by itself, within a row.
    """

    lengths: np.ndarray
    token_at: np.ndarray
    segments: tuple[int, ...]

    @classmethod
    def padded(cls, lengths: Sequence[int], width: int | None = None, *, side: str = "right") -> TokenMetadataLayout:
        """One trajectory a row, padding on `side` of it.

        Raises:
            ValueError: a trajectory longer than `width`, or a side that is neither "left" nor "right".
        """
        if side not in ("left", "right"):
            raise ValueError(f"side='{side}' is neither left nor right.")
        width = max(lengths, default=0) if width is None else width
        starts = [width - length if side == "left" else 0 for length in lengths]
        return cls._place(lengths, [[(i, start)] for i, start in enumerate(starts)], width, (width,))

    @classmethod
    def prompt_completion(
        cls,
        prompt_lengths: Sequence[int],
        completion_lengths: Sequence[int],
        prompt_width: int | None = None,
        completion_width: int | None = None,
    ) -> TokenMetadataLayout:
        """TRL's batches: prompts padded on the left, then completions padded on the right.

        A trajectory's tokens are those of its prompt, then those of its completion.

        Raises:
            ValueError: another number of prompts than completions, or one that is longer than its width.
        """
        if len(prompt_lengths) != len(completion_lengths):
            raise ValueError(f"{len(prompt_lengths)} prompts for {len(completion_lengths)} completions.")
        prompt_width = max(prompt_lengths, default=0) if prompt_width is None else prompt_width
        completion_width = max(completion_lengths, default=0) if completion_width is None else completion_width
        for i, (prompt, completion) in enumerate(zip(prompt_lengths, completion_lengths, strict=True)):
            if prompt > prompt_width or completion > completion_width:
                raise ValueError(
                    f"Trajectory {i} has a prompt of {prompt} and a completion of {completion} tokens; the batch has "
                    f"{prompt_width} and {completion_width} columns for them."
                )
        lengths = [p + c for p, c in zip(prompt_lengths, completion_lengths, strict=True)]
        width = prompt_width + completion_width
        rows = [[(i, prompt_width - prompt)] for i, prompt in enumerate(prompt_lengths)]
        return cls._place(lengths, rows, width, (width,))

    @classmethod
    def packed(cls, lengths: Sequence[int], width: int | None = None, *, multiple: int = 1) -> TokenMetadataLayout:
        """One row with all trajectories end to end, each padded on the right to a multiple of `multiple`.

        `cu_seqlens` then has one more entry than there are trajectories (two more, if `width` leaves a rest).

        Raises:
            ValueError: a width that is too small or no multiple of `multiple`.
        """
        ends = np.cumsum([-(-length // multiple) * multiple for length in lengths], dtype=np.int64)
        needed = int(ends[-1]) if len(ends) else 0
        width = needed if width is None else width
        if width < needed or width % multiple:
            raise ValueError(
                f"width={width} does not hold {len(lengths)} trajectories that take {needed} positions, in multiples "
                f"of {multiple}."
            )
        starts = [0, *ends[:-1].tolist()]
        segments = tuple(ends.tolist()) + ((width,) if width > needed else ())
        return cls._place(lengths, [[(i, start) for i, start in enumerate(starts[: len(lengths)])]], width, segments)

    @classmethod
    def packed_rows(cls, lengths: Sequence[int], rows: Sequence[Sequence[int]], width: int) -> TokenMetadataLayout:
        """Several trajectories a row, end to end, padding behind the last.

        Args:
            rows: which trajectories each row holds, each in one row.

        Raises:
            ValueError: a row that is longer than `width`, or trajectories that are in no row or in two.
        """
        if sorted(i for row in rows for i in row) != list(range(len(lengths))):
            raise ValueError(
                f"rows={[list(row) for row in rows]} do not hold each of {len(lengths)} trajectories once."
            )
        placed = []
        for row in rows:
            ends = np.cumsum([0, *(lengths[i] for i in row)])
            placed.append(list(zip(row, ends[:-1].tolist(), strict=True)))
        return cls._place(lengths, placed, width, (width,))

    @classmethod
    def _place(
        cls,
        lengths: Sequence[int],
        rows: Sequence[Sequence[tuple[int, int]]],
        width: int,
        segments: tuple[int, ...],
    ) -> TokenMetadataLayout:
        first = np.cumsum([0, *lengths])
        token_at = np.full((len(rows), width), -1, dtype=np.int64)
        for r, row in enumerate(rows):
            for i, start in row:
                if start < 0 or start + lengths[i] > width:
                    raise ValueError(
                        f"Trajectory {i} of {lengths[i]} tokens does not fit row {r}: it would end at column "
                        f"{start + lengths[i]} of {width}."
                        if start >= 0
                        else f"Trajectory {i} has {lengths[i]} tokens; the batch has {width} columns."
                    )
                token_at[r, start : start + lengths[i]] = np.arange(first[i], first[i + 1])
        return cls(np.asarray(lengths, dtype=np.int64), token_at, segments)

    # ----------------------------------------------------------------------------------------------------- positions

    @property
    def num_tokens(self) -> int:
        """`T`, tokens of all trajectories, whichever rank holds them."""
        return int(self.lengths.sum())

    @property
    def cu_seqlens(self) -> np.ndarray:
        """Int32 offsets of the segments of a packed row."""
        return np.array([0, *self.segments], dtype=np.int32)

    @property
    def predicted_at(self) -> np.ndarray:
        """`[rows, columns]` int64, the token that each position predicts: the one after its own, in its trajectory.

        -1 at padding and at the end of a trajectory. The first token of a trajectory is predicted nowhere. The position
        that predicts a token and the token's own may be on different ranks.
        """
        last = np.zeros(self.num_tokens, dtype=bool)
        last[np.cumsum(self.lengths)[self.lengths > 0] - 1] = True
        held = self.token_at >= 0
        ends = np.zeros_like(held)
        ends[held] = last[self.token_at[held]]
        return np.where(held & ~ends, self.token_at + 1, -1)

    def context_shard(self, size: int, rank: int, *, zigzag: bool) -> TokenMetadataLayout:
        """The positions that one of `size` context-parallel ranks holds, in its order.

        Args:
            zigzag: cut each segment into `2 * size` chunks and take the `rank`-th from either end, so that causal
                attention costs every rank the same; else cut the row into `size` runs.

        Raises:
            ValueError: a segment, or a row, that cannot be cut evenly.
        """
        bounds = [0, *self.segments] if zigzag else [0, self.token_at.shape[1]]
        parts = 2 * size if zigzag and size > 1 else size
        columns, ends = [np.arange(0)], []  # a packed row without trajectories has no segments
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
            if (stop - start) % parts:
                raise ValueError(
                    f"{stop - start} positions from column {start} cannot be cut into {parts} equal chunks for "
                    f"{size} context-parallel ranks: pad to a multiple of {parts}."
                )
            chunks = np.split(np.arange(start, stop), parts)
            columns += [chunks[rank], chunks[parts - 1 - rank]] if parts > size else [chunks[rank]]
            ends.append(sum(map(len, columns)))
        return replace(self, token_at=self.token_at[:, np.concatenate(columns)], segments=tuple(ends))

    # --------------------------------------------------------------------------------------------- to and from batches

    def align(self, values: Values, fill: float, *, shift: bool = False) -> Values:
        """`[T, ...]` in token order to `[rows, columns, ...]`, `fill` at padding.

        Args:
            shift: put each value where its token is predicted, instead of where the token itself is.

        Raises:
            ValueError: another number of values than tokens.
        """
        if len(values) != self.num_tokens:
            raise ValueError(
                f"{len(values)} values for the {self.num_tokens} tokens of {len(self.lengths)} trajectories."
            )
        source: np.ndarray = self.predicted_at if shift else self.token_at
        if isinstance(values, torch.Tensor):
            out = values.new_full((*source.shape, *values.shape[1:]), fill)
        else:
            out = np.full((*source.shape, *values.shape[1:]), fill, dtype=values.dtype)
        out[source >= 0] = values[source[source >= 0]]
        return out

    def restore(self, values: Values, fill: float, *, shift: bool = False) -> Values:
        """`[rows, columns, ...]` to `[T, ...]` in token order; `fill` for tokens that this rank does not hold.

        With a fill of 0 the sum over the ranks of a context-parallel group is the whole.

        Args:
            shift: the values lie where tokens are predicted, as scores do.

        Raises:
            ValueError: values of another shape than the layout's.
        """
        source: np.ndarray = self.predicted_at if shift else self.token_at
        if tuple(values.shape[:2]) != source.shape:
            raise ValueError(f"Values of shape {tuple(values.shape)} for a layout of {source.shape} positions.")
        shape = (self.num_tokens, *values.shape[2:])
        if isinstance(values, torch.Tensor):
            # Differentiable: scores come back this way.
            index = torch.from_numpy(source[source >= 0]).to(values.device)
            held = torch.from_numpy(np.flatnonzero(source >= 0)).to(values.device)
            return values.new_full(shape, fill).index_copy(0, index, values.flatten(0, 1)[held])
        out = np.full(shape, fill, dtype=values.dtype)
        out[source[source >= 0]] = values[source >= 0]
        return out

    def scored_tokens(
        self, sampled_ids: np.ndarray, token_ids: np.ndarray, offsets: np.ndarray, loss_mask: np.ndarray
    ) -> ScoredTokens:
        """The loss-bearing tokens that this rank's positions predict, checked on whole trajectories first.

        Every rank passes the same arrays, of all `T` tokens, so that every rank refuses the same trajectories.

        Args:
            sampled_ids: `[T]` integers.
            token_ids, offsets: supports of all `T` tokens in compressed sparse rows.
            loss_mask: `[T]` bool.

        Raises:
            ValueError: a support without its sampled token; a loss-bearing token without support that is not the last
                of its trajectory (a synthetic end of sequence); one that is the first, which nothing predicts; arrays
                of another length.
        """
        support = SupportCSR.from_numpy(token_ids, offsets)
        for name, length in (
            ("sampled_ids", len(sampled_ids)),
            ("offsets", len(support)),
            ("loss_mask", len(loss_mask)),
        ):
            if length != self.num_tokens:
                raise ValueError(f"{name} covers {length} tokens; the layout has {self.num_tokens}.")
        highest = max((int(x.max()) for x in (np.asarray(sampled_ids), support.host_token_ids) if x.size), default=0)
        support.validate(sampled_ids, highest + 1)
        self._check_trajectories(np.diff(support.host_offsets) > 0, np.asarray(loss_mask, dtype=bool))
        predicted = self.predicted_at.reshape(-1)
        scored = np.zeros(predicted.shape, dtype=bool)
        scored[predicted >= 0] = np.asarray(loss_mask, dtype=bool)[predicted[predicted >= 0]]
        positions = np.flatnonzero(scored)
        tokens = predicted[positions]
        return ScoredTokens(positions, tokens, np.asarray(sampled_ids, dtype=np.int64)[tokens], support.take(tokens))

    def _check_trajectories(self, supported: np.ndarray, loss_mask: np.ndarray) -> None:
        ends = np.cumsum(self.lengths)
        for i, (start, stop) in enumerate(zip(ends - self.lengths, ends, strict=True)):
            bare = np.flatnonzero(loss_mask[start:stop] & ~supported[start:stop])
            if len(bare) > 1 or (len(bare) == 1 and bare[0] != stop - start - 1):
                raise ValueError(
                    f"Trajectory {i}: {len(bare)} of {stop - start} tokens bear loss and have no support (first: token "
                    f"{bare[0]}). Only one may, a synthetic end of sequence as the very last token."
                )
            if stop > start and loss_mask[start]:
                raise ValueError(f"Trajectory {i}: its first token bears loss, and no position predicts it.")
