"""Supports of one generation batch, tied to the tokens by riding on their log-probs.

A trainer's rollout code slices, concatenates and truncates the list of log-probs of a completion together with its
tokens, and knows nothing of supports. So each recorded log-prob is a `float` that remembers which row of the batch's
table is its own: whatever happens to the list, every surviving token still finds its row.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..engine_outputs.errors import SupportCaptureError
from ..traces.routes import RoutedExperts, RoutesError
from ..traces.support import SupportRows


class TracedLogprob(float):
    """A sampled token's log-prob that knows the row of its support in a recorder's table.

    Copies keep the row, deep copies and pickles in another process too. Arithmetic, `float(x)`, JSON and arrays give
    plain numbers without a row, for which no support is found: the token is then refused, not scored in another way.

    Attributes:
        row: row in the table.
        batch: the recorder's `SupportRecorder.batch`, so that no row of another batch is taken for one of this batch.
    """

    __slots__ = ("row", "batch")
    row: int
    batch: int

    def __new__(cls, value: float, row: int, batch: int = 0) -> TracedLogprob:
        self = super().__new__(cls, value)
        self.row = row
        self.batch = batch
        return self

    def __reduce__(self) -> tuple:
        return type(self), (float(self), self.row, self.batch)


@dataclass(frozen=True)
class _RoutedRequest:
    """What one request ran through the model: `[P + T]` ids, of which `P` are its prompt, and their routes."""

    ids: np.ndarray
    num_prompt: int
    routes: RoutedExperts


class SupportRecorder:
    """The table of supports of one generation batch.

    Attributes:
        batch: a number that no other recorder has, in this process or another.
        repaired: number of rows that are not as the engine gave them, or that lack members (see `vllm_outputs`).
    """

    def __init__(self) -> None:
        self.batch = secrets.randbits(63)
        self._chunks: list[SupportRows] = []
        self._token_ids: list[np.ndarray] = []
        self._num_rows = 0
        self._starts: list[int] = []  # first row of each `add`
        self._routed: list[_RoutedRequest | None] = []  # one for each `add`
        self.repaired = 0

    def __len__(self) -> int:
        return self._num_rows

    def add(
        self,
        token_ids: Sequence[int],
        logprobs: np.ndarray,
        rows: SupportRows,
        repaired: int = 0,
        routes: RoutedExperts | None = None,
        prompt_ids: Sequence[int] | np.ndarray = (),
    ) -> list[TracedLogprob]:
        """Append the rows of the tokens that one request sampled.

        Args:
            token_ids: `[T]`, the sampled tokens.
            logprobs: `[T]`, log-prob of each sampled token under the engine's processed distribution.
            rows: the `T` supports.
            repaired: how many of them were repaired or lack members.
            routes: routes of the request's prompt and of these tokens, `P + T`, when they are recorded.
            prompt_ids: `[P]`, the request's prompt; needed with `routes`.

        Returns:
            `T` log-probs that remember their rows.
        """
        if not len(token_ids) == len(logprobs) == len(rows):
            raise SupportCaptureError(
                f"{len(token_ids)} tokens came with {len(logprobs)} log-probs and {len(rows)} support rows."
            )
        start = self._num_rows
        ids = np.asarray(token_ids, dtype=np.int64)
        routed = None
        if routes is not None:
            routed = _RoutedRequest(np.append(np.asarray(prompt_ids, dtype=np.int64), ids), len(prompt_ids), routes)
            routes.check(num_tokens=len(routed.ids), where="A request's prompt and sampled tokens")
        self._starts.append(start)
        self._routed.append(routed)
        self._chunks.append(rows)
        self._token_ids.append(ids)
        self._num_rows += len(rows)
        self.repaired += repaired
        return [TracedLogprob(value, start + i, self.batch) for i, value in enumerate(logprobs.tolist())]

    def table(self) -> SupportRows:
        """All rows added so far."""
        if len(self._chunks) > 1:
            self._chunks = [SupportRows.concatenate(self._chunks)]
        return self._chunks[0] if self._chunks else SupportRows.empty(0)

    def token_ids(self) -> np.ndarray:
        """`[len(self)]` int64, the sampled tokens in the order of the table."""
        return np.concatenate(self._token_ids) if self._token_ids else np.zeros(0, np.int64)

    def row_indices(self, logprobs: Sequence[float | None]) -> np.ndarray:
        """`[T]` int64 indices into the table; -1 where this recorder did not record a log-prob (an observation)."""
        rows = (x.row if isinstance(x, TracedLogprob) and x.batch == self.batch else -1 for x in logprobs)
        return np.fromiter(rows, dtype=np.int64, count=len(logprobs))

    def routes_of(
        self, indices: np.ndarray, token_ids: np.ndarray, prompt_length: int, where: str
    ) -> RoutedExperts | None:
        """Routes of a prompt and its completion, put together from the requests that sampled its tokens.

        The experts of position `p` count for the log-prob of the sampled token after it. So they are taken from the
        request that sampled that token, which had `p` in its prompt or sampled it itself. Hence a request's routes end
        before its last kept token, whatever it sampled beyond; that token and the observations behind it were routed
        again in the prompt of the next request. Where a request has no routes for a position, a later one's are taken.

        Args:
            indices: `[T]` from `row_indices`; -1 for tokens that were not sampled.
            token_ids: `[P + T]` ids of prompt and completion.
            prompt_length: `P`.
            where: how to call the completion in errors.

        Returns:
            `P + T` routes, uncaptured where no request reported any; `None` when no token was sampled, or when a
            request brought no routes.

        Raises:
            RoutesError: a request that sampled a token after other tokens than those that stand before it.
        """
        sampled = np.flatnonzero(indices >= 0)
        requests = np.searchsorted(self._starts, indices[sampled], side="right") - 1
        runs: list[tuple[RoutedExperts, int]] = []  # routes of each request, and the position of its last kept token
        for request in dict.fromkeys(requests.tolist()):
            routed = self._routed[request]
            if routed is None:
                return None
            own = sampled[requests == request]
            _check_same_history(routed, own, indices[own] - self._starts[request], token_ids, prompt_length, where)
            runs.append((routed.routes, prompt_length + int(own[-1])))
        if not runs:
            return None
        run_of = np.full(len(token_ids), -1)
        for i, (routes, last) in reversed(list(enumerate(runs))):
            end = last + (i == len(runs) - 1)
            run_of[:end][routes.captured[:end]] = i
        bounds = [0, *(np.flatnonzero(np.diff(run_of)) + 1).tolist(), len(run_of)]
        missing = RoutedExperts.empty(
            len(run_of), layers=runs[0][0].layers, top_k=runs[0][0].top_k, num_experts=runs[0][0].num_experts
        )
        sources = [*(routes for routes, _ in runs), missing]  # -1 is the last one
        return RoutedExperts.concatenate(
            [sources[run_of[start]][start:end] for start, end in itertools.pairwise(bounds)]
        )

    def no_routes(self, num_tokens: int) -> RoutedExperts | None:
        """`num_tokens` uncaptured tokens, of the model that the requests' routes are of; `None` without any routes."""
        for routed in self._routed:
            if routed is not None:
                return routed.routes.take(np.full(num_tokens, -1))
        return None


def _check_same_history(
    routed: _RoutedRequest,
    tokens: np.ndarray,
    steps: np.ndarray,
    token_ids: np.ndarray,
    prompt_length: int,
    where: str,
) -> None:
    """Raise unless completion tokens `tokens`, sampled at a request's `steps`, stand after the same tokens here."""
    there, here = routed.num_prompt + steps, prompt_length + tokens
    moved = there != here
    if moved.any():
        first = int(np.argmax(moved))
        raise RoutesError(
            f"{where}: token {tokens[first]} was sampled at position {there[first]} of its request, and stands at "
            f"position {here[first]}. Tokens may be cut off the end of a turn, not off its beginning or out of it."
        )
    end = int(here[-1]) + 1
    differs = routed.ids[:end] != token_ids[:end]
    if differs.any():
        first = int(np.argmax(differs))
        raise RoutesError(
            f"{where}: the request that sampled token {tokens[-1]} had id {routed.ids[first]} at position {first}, and "
            f"here it is {token_ids[first]}, so its routes are not those of these tokens. A rollout must append to the "
            "ids that it sampled from."
        )
