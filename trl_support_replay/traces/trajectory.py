"""`TrajectoryTrace`: assembles a conversation turn by turn, and loses no row of side data on the way."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .fields import ArrayField, Field, SupportField, TokenData, TrajectoryError
from .finalized import Trajectory

_TOKEN_IDS = ArrayField("token_ids", np.int32, fill=-1)
_LOGPROBS = ArrayField("logprobs", np.float32, fill=np.nan)


class _Rows:
    """Rows of one field, grown and cut at the end; both cost what is added or removed."""

    def __init__(self, spec: Field) -> None:
        self.spec = spec
        self._chunks: list[TokenData] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, chunk: TokenData) -> None:
        if len(chunk):
            self._chunks.append(chunk)
            self._length += len(chunk)

    def cut(self, length: int) -> None:
        """Keep the first `length` rows."""
        while self._length > length:
            chunk = self._chunks.pop()
            self._length -= len(chunk)
            self.append(chunk[: max(length - self._length, 0)])

    def after(self, length: int) -> TokenData:
        """The row after the first `length`, which is the last one, or no row."""
        return self._chunks[-1][-1:] if self._length > length else self.spec.blank(0)

    def joined(self) -> TokenData:
        return self.spec.join(self._chunks)

    def at(self, index: int) -> Any:
        """One row; near the end it is found fast."""
        start = self._length
        for chunk in reversed(self._chunks):
            start -= len(chunk)
            if start <= index:
                return chunk[index - start]
        raise IndexError(f"Row {index} of {self._length}.")


@dataclass(frozen=True)
class _RemovedEos:
    """A sampled end of sequence that is out of the completion for now, with a row of each field (or none yet)."""

    position: int
    rows: Mapping[str, TokenData]


class TrajectoryTrace:
    """A conversation in the making: a prompt, then sampled turns and observations, appended in O(new tokens).

    Arrays that are handed over are kept, not copied: do not write into them afterwards.

    The end of sequence of a turn may be taken out (`remove_eos`), for a chat template that wants none in the middle,
    and put back (`restore_eos`) with the row it was sampled with. It belongs to the last turn: observations that came
    after it are dropped then, and sampling another turn gives it up.

    ```python
    trace = TrajectoryTrace(prompt_ids, [SupportField(vocab_size)], eos_token_ids=[2])
    trace.append_sampled(token_ids, logprobs, support=rows)
    trace.append_observation(tool_result_ids)
    trace.append_sampled(...)
    trajectory = trace.finalize()
    ```

    Args:
        prompt_ids: `[P]` ids.
        fields: the side data that every sampled turn brings; names differ.
        eos_token_ids: ids that end a sequence.
    """

    def __init__(
        self,
        prompt_ids: Any,
        fields: Sequence[Field] = (SupportField(),),
        *,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        self.fields = tuple(fields)
        self._prompt_ids = _token_ids(prompt_ids, "prompt_ids")
        self._eos_token_ids = frozenset(eos_token_ids)
        self._stores = {spec.name: _Rows(spec) for spec in (_TOKEN_IDS, _LOGPROBS, *self.fields)}
        if len(self._stores) != len(self.fields) + 2:
            raise TrajectoryError(f"Field names {[spec.name for spec in self.fields]} are not unique, or are reserved.")
        self._per_token = [rows for rows in self._stores.values() if rows.spec.scope == "sampled"]
        self._per_sequence = [rows for rows in self._stores.values() if rows.spec.scope == "sequence"]
        self._turns: list[tuple[int, int]] = []
        self._removed_eos: _RemovedEos | None = None
        self._synthetic_eos = False

    def __len__(self) -> int:
        """Number of completion tokens, `T`."""
        return len(self._stores["token_ids"])

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens, `P`."""
        return len(self._prompt_ids)

    @property
    def num_turns(self) -> int:
        """Number of sampled turns so far."""
        return len(self._turns)

    def append_sampled(self, token_ids: Any, logprobs: Any, **side: Any) -> None:
        """A turn that the policy sampled.

        Args:
            token_ids: `[n]` sampled ids.
            logprobs: `[n]` log-probs of these tokens as the engine drew them.
            side: `[n]` rows of each field in "sampled" scope, by name. Rows in "sequence" scope go to `record`.

        Raises:
            TrajectoryError: a field missing or unknown; rows of the wrong count, type or width; a log-prob that is NaN
                or infinite; or a trajectory that a synthetic end of sequence has closed.
            SupportError: a support that does not hold its sampled token, and other faults within a row.
        """
        where = f"turn {self.num_turns}"
        self._check_open(where)
        ids = _token_ids(token_ids, f"{where}: token_ids")
        values = np.asarray(logprobs, dtype=np.float32)
        if values.shape != ids.shape:
            raise TrajectoryError(f"{where}: log-probs of shape {values.shape} for {len(ids)} tokens.")
        if not np.isfinite(values).all():
            token = int(np.argmin(np.isfinite(values)))
            raise TrajectoryError(f"{where}: token {token} (id {ids[token]}) has log-prob {values[token]}.")
        wanted = {rows.spec.name for rows in self._per_token} - {"token_ids", "logprobs"}
        if wanted != set(side):
            raise TrajectoryError(
                f"{where}: the trace was made for the fields {sorted(wanted)}, and the turn brings {sorted(side)}. "
                "A rollout has to hand over every field that was asked for."
            )
        chunks = {name: self._stores[name].spec.check(data, ids, where) for name, data in side.items()}
        # Everything is checked before anything is stored: a refused turn leaves the trace as it was.
        start = len(self)
        for name, chunk in {"token_ids": ids, "logprobs": values, **chunks}.items():
            self._stores[name].append(chunk)
        self._turns.append((start, len(self)))
        self._removed_eos = None

    def append_observation(self, token_ids: Any) -> None:
        """Tokens that the policy did not sample: `[n]` ids, with blank rows and out of the loss."""
        self._check_open("observation")
        ids = _token_ids(token_ids, "observation")
        for rows in self._per_token:
            rows.append(ids if rows.spec is _TOKEN_IDS else rows.spec.blank(len(ids)))

    def append_history(self, token_ids: Any) -> None:
        """Take what follows the tokens so far, in the ids of the next request, as an observation.

        Compares all ids so far, so this costs the whole history; `append_observation` costs what is new.

        Args:
            token_ids: `[m]` ids of prompt, completion so far and what is new.

        Raises:
            TrajectoryError: the ids do not begin with the trace's own. That is a history that was rendered and
                tokenized anew: its tokens are not the sampled ones, and no row would fit them.
        """
        ids = _token_ids(token_ids, "history")
        known = np.concatenate([self._prompt_ids, self._token_ids()])
        common = min(len(ids), len(known))
        differs = ids[:common] != known[:common]
        if differs.any():
            place = int(np.argmax(differs))
            raise TrajectoryError(
                f"The history has id {ids[place]} at position {place}, where the trace has id {known[place]}. It was "
                "tokenized anew: build each request by appending ids to the ids that were sampled."
            )
        if len(ids) < len(known):
            raise TrajectoryError(f"The history has {len(ids)} tokens, and the trace already {len(known)}.")
        self.append_observation(ids[len(known) :])

    def record(self, name: str, values: Any, start: int) -> None:
        """Rows of a field in "sequence" scope, for tokens that are already there.

        Args:
            name: the field.
            values: rows of the tokens `start`, `start + 1`, … of prompt and completion together: those that the engine
                gave, and no blank ones behind them, since a row that is there is not replaced.
            start: may lie before the end of the rows recorded so far. Those rows were in use when their tokens were
                sampled; they stay, and only what is new is taken.

        Raises:
            TrajectoryError: a gap before `start`, or rows beyond the last token.
        """
        where = f"record({name!r})"
        rows = self._stores.get(name)
        if rows is None or rows.spec.scope != "sequence":
            raise TrajectoryError(f"{where}: the sequence fields are {[r.spec.name for r in self._per_sequence]}.")
        num_tokens = self.num_prompt_tokens + len(self)
        if not 0 <= start <= len(rows):
            raise TrajectoryError(f"{where}: rows start at token {start}, and {len(rows)} tokens have rows so far.")
        if start + len(values) > num_tokens:
            raise TrajectoryError(f"{where}: rows end at token {start + len(values)} of {num_tokens}.")
        tokens = np.empty(len(values), dtype=np.int32)  # only their number matters in this scope
        chunk = rows.spec.check(values, tokens, where)
        rows.append(chunk[len(rows) - start :])

    def num_recorded(self, name: str) -> int:
        """How many tokens of the sequence have rows of this field: what to ask the engine to start from."""
        return len(self._stores[name])

    def remove_eos(self) -> int:
        """Take the sampled end of sequence off the end of the completion, keep its rows, and return its id.

        Raises:
            TrajectoryError: the last token is not a sampled end of sequence.
        """
        if not self._turn_ends_in_eos() or self._turns[-1][1] != len(self):
            raise TrajectoryError(
                f"The last of {len(self)} completion tokens is not a sampled end of sequence; those have the ids "
                f"{sorted(self._eos_token_ids)}."
            )
        position = len(self) - 1
        held = {name: rows.after(self._num_rows(rows, position)) for name, rows in self._stores.items()}
        self._removed_eos = _RemovedEos(position, held)
        self._cut(position)
        start, _ = self._turns.pop()
        self._turns.append((start, position))
        return int(np.asarray(held["token_ids"])[0])

    def restore_eos(self) -> None:
        """Put the removed end of sequence back where it was sampled, with its rows. Observations after it go first.

        Raises:
            TrajectoryError: none was removed since the last sampled turn.
        """
        eos = self._removed_eos
        if eos is None:
            raise TrajectoryError("No end of sequence was removed from the last sampled turn.")
        self._cut(eos.position)
        for name, chunk in eos.rows.items():
            self._stores[name].append(chunk)
        start, _ = self._turns.pop()
        self._turns.append((start, len(self)))
        self._removed_eos = None

    def append_synthetic_eos(self, token_id: int) -> None:
        """End the last turn with an end of sequence that was never sampled, and so has blank rows; nothing may follow.

        Observations at the end go first: the end of sequence belongs to the turn.

        Raises:
            TrajectoryError: no turn to end, a turn that has a sampled one of its own, or an id that ends no sequence.
        """
        self._check_open("synthetic end of sequence")
        if token_id not in self._eos_token_ids:
            raise TrajectoryError(f"Token id {token_id} does not end a sequence; {sorted(self._eos_token_ids)} do.")
        if not self._turns:
            raise TrajectoryError("There is no sampled turn that an end of sequence could close.")
        if self._removed_eos is not None:
            raise TrajectoryError("The last turn has a sampled end of sequence, which was removed: restore that one.")
        stop = self._turns[-1][1]
        if self._turn_ends_in_eos():
            raise TrajectoryError(f"The last turn ends in a sampled end of sequence, at token {stop - 1}.")
        self._cut(stop)
        self.append_observation([token_id])
        self._synthetic_eos = True

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` completion tokens, and of every field the rows that belong to them.

        Whatever lies at or after that position goes: turns that start there, and an end of sequence that was removed
        from there.

        Raises:
            TrajectoryError: a negative number.
        """
        if num_tokens < 0:
            raise TrajectoryError(f"Cannot truncate a completion to {num_tokens} tokens.")
        if num_tokens < len(self):
            self._cut(num_tokens)
            self._synthetic_eos = False
        self._turns = [(start, min(stop, num_tokens)) for start, stop in self._turns if start < num_tokens]
        if self._removed_eos is not None and self._removed_eos.position >= num_tokens:
            self._removed_eos = None

    def finalize(
        self,
        synthetic_eos: Literal["full_vocab", "mask", "error"] = "full_vocab",
        info: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        """The trajectory so far, every count checked. The trace stays usable.

        Tokens of sequence fields that were never recorded get blank rows.

        Args:
            synthetic_eos: what becomes of a synthetic end of sequence: part of the loss ("full_vocab": it will be
                scored over the whole vocabulary), left out of it ("mask"), or refused ("error").
            info: what belongs to the trajectory as a whole.

        Raises:
            TrajectoryError: a synthetic end of sequence that is refused.
        """
        turns = np.array(self._turns, dtype=np.int64).reshape(-1, 2)
        logprobs = np.asarray(self._stores["logprobs"].joined())
        loss_mask = ~np.isnan(logprobs)
        if self._synthetic_eos:
            if synthetic_eos == "error":
                raise TrajectoryError(
                    f"Token {len(self) - 1} (id {self._token_ids()[-1]}) is an end of sequence that was not sampled, "
                    "and synthetic_eos='error' refuses it. Set synthetic_eos to 'full_vocab' or 'mask'."
                )
            if synthetic_eos == "full_vocab":
                loss_mask[-1] = True
                turns[-1, 1] += 1
        side = {}
        for spec in self.fields:
            rows = self._stores[spec.name]
            side[spec.name] = rows.joined()
            missing = self._num_rows(rows, len(self)) - len(rows)
            if missing:
                side[spec.name] = spec.join([side[spec.name], spec.blank(missing)])
        return Trajectory(
            prompt_ids=self._prompt_ids,
            completion_ids=self._token_ids(),
            loss_mask=loss_mask,
            logprobs=logprobs,
            turns=turns,
            side=side,
            fields=self.fields,
            info=dict(info or {}),
        )

    def _cut(self, num_tokens: int) -> None:
        for rows in self._stores.values():
            rows.cut(self._num_rows(rows, num_tokens))

    def _num_rows(self, rows: _Rows, num_tokens: int) -> int:
        return num_tokens + (self.num_prompt_tokens if rows.spec.scope == "sequence" else 0)

    def _token_ids(self) -> np.ndarray:
        return np.asarray(self._stores["token_ids"].joined())

    def _turn_ends_in_eos(self) -> bool:
        start, stop = self._turns[-1] if self._turns else (0, 0)
        return start < stop and int(self._stores["token_ids"].at(stop - 1)) in self._eos_token_ids

    def _check_open(self, where: str) -> None:
        if self._synthetic_eos:
            raise TrajectoryError(
                f"{where}: the trajectory ends in a synthetic end of sequence, after which nothing may follow."
            )


def _token_ids(values: Any, name: str) -> np.ndarray:
    ids = np.asarray(values)
    if ids.ndim != 1 or ids.size and ids.dtype.kind not in "iu":
        raise TrajectoryError(f"{name} of type {ids.dtype} and shape {ids.shape} are not a list of token ids.")
    outside = (ids < 0) | (ids > np.iinfo(np.int32).max)
    if outside.any():
        raise TrajectoryError(f"{name}: id {ids[outside][0]} at position {int(np.argmax(outside))} is not a token id.")
    return ids.astype(np.int32)
