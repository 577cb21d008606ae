"""`Trajectory`: a finished conversation, token by token, and batches of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .columns import Trace
from .fields import Field, TokenData, TrajectoryError
from .routes import RoutedExperts
from .support import SupportRows


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One prompt of `P` tokens and its completion of `T` tokens, over `n` sampled turns.

    Every array is in completion order; observations (tool results, user turns) are part of the completion.

    Args:
        prompt_ids: `[P]` int32.
        completion_ids: `[T]` int32.
        loss_mask: `[T]` bool, the tokens that the loss is over: sampled ones and, where it is to be trained on, a
            synthetic end of sequence.
        logprobs: `[T]` float32, natural logarithm of each sampled token's probability in the engine; NaN, never 0,
            where no token was sampled.
        turns: `[n, 2]` int64, first token and one past the last of each sampled turn. A turn may be empty.
        side: other token-aligned data by field name; `[T]` rows in "sampled" scope, `[P + T]` in "sequence" scope.
        fields: what the entries of `side` are.
        info: anything that belongs to the trajectory as a whole (a reward, an identity); carried along.

    Raises:
        TrajectoryError: counts, types or turns that do not agree, an infinite log-prob, or a loss-bearing token that
            nobody sampled, except one at the very end.
    """

    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    turns: np.ndarray
    side: Mapping[str, TokenData]
    fields: tuple[Field, ...]
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num_tokens = len(self.completion_ids)
        for name, dtype, shape in (
            ("prompt_ids", np.int32, (len(self.prompt_ids),)),
            ("completion_ids", np.int32, (num_tokens,)),
            ("loss_mask", np.bool_, (num_tokens,)),
            ("logprobs", np.float32, (num_tokens,)),
            ("turns", np.int64, (len(self.turns), 2)),
        ):
            array = getattr(self, name)
            if array.dtype != dtype or array.shape != shape:
                raise TrajectoryError(
                    f"{name} is {array.dtype} {array.shape}, not {np.dtype(dtype)} {shape}, "
                    f"beside {num_tokens} completion tokens."
                )
        if {spec.name for spec in self.fields} != set(self.side):
            raise TrajectoryError(f"Side data {sorted(self.side)} for fields {sorted(s.name for s in self.fields)}.")
        for spec in self.fields:
            expected = self.num_rows(spec)
            if len(self.side[spec.name]) != expected:
                raise TrajectoryError(
                    f"{spec.name} has {len(self.side[spec.name])} rows; {len(self.prompt_ids)} prompt and {num_tokens} "
                    f"completion tokens need {expected} in scope {spec.scope!r}."
                )
        self._check_turns()

    def _check_turns(self) -> None:
        num_tokens = len(self)
        bounds = np.concatenate([[0], self.turns.reshape(-1), [num_tokens]])
        if (bounds[1:] < bounds[:-1]).any():
            raise TrajectoryError(f"Turns {self.turns.tolist()} overlap or leave {num_tokens} completion tokens.")
        infinite = np.isinf(self.logprobs)
        if infinite.any():
            token = int(np.argmax(infinite))
            raise TrajectoryError(f"Token {token} has log-prob {self.logprobs[token]}.")
        in_turn = np.zeros(num_tokens + 1, dtype=np.int64)
        np.add.at(in_turn, self.turns[:, 0], 1)
        np.add.at(in_turn, self.turns[:, 1], -1)
        covered = np.cumsum(in_turn[:-1]) > 0
        bare = self.loss_mask & ~self.sampled
        wrong = np.flatnonzero(bare[:-1])
        if len(wrong):
            raise TrajectoryError(
                f"{int(bare.sum())} of {num_tokens} tokens are loss-bearing and have no log-prob, first token "
                f"{wrong[0]} (id {self.completion_ids[wrong[0]]}). Only a synthetic end of sequence, as the last "
                "token, may go without; observations belong in loss_mask as False."
            )
        stray = covered != (self.sampled | bare)
        if stray.any():
            token = int(np.argmax(stray))
            place = "inside" if covered[token] else "outside"
            state = "a" if self.sampled[token] else "no"
            raise TrajectoryError(
                f"Token {token} lies {place} the turns {self.turns.tolist()} and has {state} log-prob."
            )

    @property
    def support(self) -> SupportRows:
        """The `T` supports; empty where no token was sampled."""
        return self._side("support", SupportRows)

    @property
    def routed_experts(self) -> RoutedExperts:
        """The `P + T` routes."""
        return self._side("routed_experts", RoutedExperts)

    def _side(self, name: str, kind: type) -> Any:
        if name not in self.side:
            raise TrajectoryError(f"This trajectory has no {name}; it has {sorted(self.side)}.")
        data = self.side[name]
        assert isinstance(data, kind)
        return data

    @property
    def sampled(self) -> np.ndarray:
        """Bool `[T]`: tokens that the policy sampled."""
        return ~np.isnan(self.logprobs)

    @property
    def has_synthetic_eos(self) -> bool:
        """Does the loss go over a last token that nobody sampled?"""
        return bool(len(self) and self.loss_mask[-1] and np.isnan(self.logprobs[-1]))

    def num_rows(self, spec: Field) -> int:
        """Rows that a field's data must have."""
        return len(self) + (len(self.prompt_ids) if spec.scope == "sequence" else 0)

    def steps(self) -> list[Trajectory]:
        """One trajectory for each turn: its prompt is all that came before, its completion that turn's response.

        Side data are views of this trajectory's.
        """
        num_prompt = len(self.prompt_ids)
        sequence = np.concatenate([self.prompt_ids, self.completion_ids])
        steps = []
        for start, stop in self.turns.tolist():
            rows = {"sampled": slice(start, stop), "sequence": slice(0, num_prompt + stop)}
            steps.append(
                replace(
                    self,
                    prompt_ids=sequence[: num_prompt + start],
                    completion_ids=self.completion_ids[start:stop],
                    loss_mask=self.loss_mask[start:stop],
                    logprobs=self.logprobs[start:stop],
                    turns=np.array([[0, stop - start]]),
                    side={spec.name: self.side[spec.name][rows[spec.scope]] for spec in self.fields},
                )
            )
        return steps

    def to_trace(self) -> Trace:
        """What a traces dataset keeps of this trajectory: one row of its columns, `info` as further columns.

        Raises:
            TrajectoryError: fields that such a dataset has no columns for.
        """
        unknown = set(self.side) - {"support", "routed_experts"}
        if unknown or "support" not in self.side:
            raise TrajectoryError(
                f"A traces dataset keeps support and, if there are any, routed_experts; this has {sorted(self.side)}."
            )
        routes = self.routed_experts if "routed_experts" in self.side else None
        return Trace(
            self.prompt_ids, self.completion_ids, self.loss_mask, self.logprobs, self.support, routes, dict(self.info)
        )

    def validate(self, *, vocab_size: int | None = None, where: str = "trajectory") -> None:
        """Check each support against the tokens: a sampled token's holds it, any other token's is empty.

        Args:
            vocab_size: rows of the language-model head.
            where: what to call this trajectory in errors.

        Raises:
            SupportError: see `SupportRows.validate`.
            TrajectoryError: a sampled token with an empty support, or another token with one.
        """
        if "support" not in self.side:
            return
        support = self.support
        filled = support.sizes > 0
        wrong = filled != self.sampled
        if wrong.any():
            token = int(np.argmax(wrong))
            state = "was sampled, and its support is empty" if self.sampled[token] else "was not sampled"
            raise TrajectoryError(
                f"{where}: token {token} (id {self.completion_ids[token]}) {state}; "
                f"its support has {int(support.sizes[token])} ids."
            )
        support.validate(vocab_size=vocab_size, sampled_ids=self.completion_ids, where=where)

    def __len__(self) -> int:
        return len(self.completion_ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trajectory):
            return NotImplemented
        return (
            self.fields == other.fields
            and dict(self.info) == dict(other.info)
            and all(
                np.array_equal(getattr(self, name), getattr(other, name))
                for name in ("prompt_ids", "completion_ids", "loss_mask", "turns")
            )
            and np.array_equal(self.logprobs, other.logprobs, equal_nan=True)
            and all(_equal(self.side[name], other.side[name]) for name in self.side)
        )

    __hash__ = None  # type: ignore[assignment]


def _equal(data: TokenData, other: TokenData) -> bool:
    if isinstance(data, np.ndarray):
        return isinstance(other, np.ndarray) and np.array_equal(data, other, equal_nan=data.dtype.kind == "f")
    return data == other


class TrajectoryBatch(Sequence[Trajectory]):
    """Trajectories with the same fields and kinds of info. Choosing among them carries whatever they hold.

    Raises:
        TrajectoryError: trajectories whose fields, or whose keys of `info`, differ.
    """

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        self._trajectories = list(trajectories)
        for i, trajectory in enumerate(self._trajectories):
            first = self._trajectories[0]
            for what, has, needs in (
                ("fields", trajectory.fields, first.fields),
                ("info", sorted(trajectory.info), sorted(first.info)),
            ):
                if has != needs:
                    raise TrajectoryError(
                        f"Trajectory {i} has {what} {has}, trajectory 0 has {needs}. A rollout that drops something "
                        "has to be mended where it builds its trajectories."
                    )

    @property
    def fields(self) -> tuple[Field, ...]:
        """Fields of every trajectory; none when there is no trajectory."""
        return self._trajectories[0].fields if self._trajectories else ()

    def __len__(self) -> int:
        return len(self._trajectories)

    def __getitem__(self, index: Any) -> Any:
        """One trajectory by integer; a batch by slice, integers, or boolean mask of the batch's length."""
        if isinstance(index, slice):
            return TrajectoryBatch(self._trajectories[index])
        chosen = np.asarray(index)
        if chosen.ndim == 0 and chosen.dtype.kind in "iu":
            return self._trajectories[int(chosen)]
        if chosen.ndim != 1 or chosen.size and chosen.dtype.kind not in "iub":
            raise TypeError(f"Trajectories are chosen by integers or a boolean mask, not by {index!r}.")
        if chosen.dtype == bool:
            if len(chosen) != len(self):
                raise TrajectoryError(f"A mask of {len(chosen)} chooses among {len(self)} trajectories.")
            chosen = np.flatnonzero(chosen)
        return TrajectoryBatch([self._trajectories[i] for i in chosen.tolist()])

    def replaced(self, indices: Sequence[int], trajectories: Sequence[Trajectory]) -> TrajectoryBatch:
        """This batch with the trajectories at `indices` replaced by others, in order."""
        indices = np.asarray(indices, dtype=np.int64).tolist()
        if len(indices) != len(trajectories):
            raise TrajectoryError(f"{len(trajectories)} trajectories for {len(indices)} places.")
        result = list(self._trajectories)
        for i, trajectory in zip(indices, trajectories, strict=True):
            result[i] = trajectory
        return TrajectoryBatch(result)

    def rollout(self) -> dict[str, list[Any]]:
        """What a `rollout_func` of TRL's returns, with the supports and routes that replay needs, and `info` besides.

        Tokens that nobody sampled get the log-prob 0 that TRL expects there. `env_mask` is `loss_mask`: it keeps
        observations out of the loss, but not a synthetic end of sequence that `finalize(synthetic_eos="full_vocab")`
        left in it; the trainer knows that one by its empty support, and scores it over the whole vocabulary.

        Raises:
            TrajectoryError: a trajectory that [`to_trace`] refuses, or `info` under a name that a rollout uses itself.
        """
        traces = [trajectory.to_trace() for trajectory in self]
        output: dict[str, list[Any]] = {
            "prompt_ids": [trace.prompt_ids.tolist() for trace in traces],
            "completion_ids": [trace.completion_ids.tolist() for trace in traces],
            "logprobs": [np.nan_to_num(trace.sampling_logprobs, nan=0.0).tolist() for trace in traces],
            "env_mask": [trace.loss_mask.astype(int).tolist() for trace in traces],
            "support_ids": [trace.supports for trace in traces],
        }
        names = list(traces[0].extra) if traces else []
        taken = sorted({*output, "routed_experts"}.intersection(names))
        if taken:
            raise TrajectoryError(f"info has {taken}, which a rollout uses for tokens. Name it otherwise.")
        if any(trace.routes is not None for trace in traces):
            output["routed_experts"] = [trace.routes for trace in traces]
        return output | {name: [trace.extra[name] for trace in traces] for name in names}

    def __add__(self, other: TrajectoryBatch) -> TrajectoryBatch:
        return TrajectoryBatch([*self._trajectories, *other._trajectories])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrajectoryBatch) and self._trajectories == other._trajectories

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TrajectoryBatch({len(self)} trajectories, {sum(map(len, self._trajectories))} completion tokens)"
