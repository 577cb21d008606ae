"""Supports of one generation batch, tied to the tokens by riding on their log-probs.

A trainer's rollout code slices, concatenates and truncates the list of log-probs of a completion together with its
tokens, and knows nothing of supports. So each recorded log-prob is a `float` that remembers which row of the batch's
table is its own: whatever happens to the list, every surviving token still finds its row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..traces.routes import RoutedExperts, RoutesError
from ..traces.support import SupportRows


class SupportCaptureError(RuntimeError):
    """An engine's answer does not hold the supports that were asked for."""


class TracedLogprob(float):
    """A sampled token's log-prob that knows the row of its support in the recorder's table."""

    __slots__ = ("row",)
    row: int

    def __new__(cls, value: float, row: int) -> TracedLogprob:
        self = super().__new__(cls, value)
        self.row = row
        return self


class SupportRecorder:
    """The table of supports of one generation batch.

    Attributes:
        repaired: number of rows whose sampled token had to be put in, since the engine left it out.
    """

    def __init__(self) -> None:
        self._chunks: list[SupportRows] = []
        self._token_ids: list[np.ndarray] = []
        self._num_rows = 0
        self._starts: list[int] = []  # first row of each `add`
        self._routes: list[RoutedExperts | None] = []
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
    ) -> list[TracedLogprob]:
        """Append the rows of the tokens that one request sampled.

        Args:
            token_ids: `[T]`, the sampled tokens.
            logprobs: `[T]`, log-prob of each sampled token under the engine's processed distribution.
            rows: the `T` supports.
            repaired: how many of them were repaired.
            routes: routes of the request's prompt and of these tokens, when they are recorded.

        Returns:
            `T` log-probs that remember their rows.
        """
        if not len(token_ids) == len(logprobs) == len(rows):
            raise SupportCaptureError(
                f"{len(token_ids)} tokens came with {len(logprobs)} log-probs and {len(rows)} support rows."
            )
        start = self._num_rows
        self._starts.append(start)
        self._routes.append(routes)
        self._chunks.append(rows)
        self._token_ids.append(np.asarray(token_ids, dtype=np.int64))
        self._num_rows += len(rows)
        self.repaired += repaired
        return [TracedLogprob(value, start + i) for i, value in enumerate(logprobs.tolist())]

    def table(self) -> SupportRows:
        """All rows added so far."""
        if len(self._chunks) > 1:
            self._chunks = [SupportRows.concatenate(self._chunks)]
        return self._chunks[0] if self._chunks else SupportRows.empty(0)

    def token_ids(self) -> np.ndarray:
        """`[len(self)]` int64, the sampled tokens in the order of the table."""
        return np.concatenate(self._token_ids) if self._token_ids else np.zeros(0, np.int64)

    def routes_of(self, indices: np.ndarray, prompt_length: int, where: str) -> RoutedExperts | None:
        """Routes of a prompt and its completion, put together from the requests that sampled its tokens.

        A later request has the earlier ones in its prompt. The rows of the request that sampled a token are kept; a
        later one adds only what is new, so that each token keeps the experts it was sampled through.

        Args:
            indices: `[T]` from `row_indices`; -1 for tokens that were not sampled.
            prompt_length: `P`.
            where: how to call the completion in errors.

        Returns:
            `P + T` routes, uncaptured where no request reported any; `None` when the requests brought no routes.

        Raises:
            RoutesError: a request whose prompt is not the prompt and completion up to it.
        """
        sampled = np.flatnonzero(indices >= 0)
        requests = np.searchsorted(self._starts, indices[sampled], side="right") - 1
        parts: list[RoutedExperts] = []
        filled, total = 0, prompt_length + len(indices)
        for request in dict.fromkeys(requests.tolist()):
            routes = self._routes[request]
            if routes is None:
                return None
            first = int(sampled[np.argmax(requests == request)])
            num_sampled = (self._starts[request + 1 :] or [self._num_rows])[0] - self._starts[request]
            if len(routes) - num_sampled != prompt_length + first:
                raise RoutesError(
                    f"{where}: a request with a prompt of {len(routes) - num_sampled} tokens sampled token {first}, "
                    f"which stands after {prompt_length + first} tokens."
                )
            end = min(routes.captured_prefix, total)
            parts.append(routes[filled:end])
            filled = max(filled, end)
        if not parts:
            return None
        whole = RoutedExperts.concatenate(parts)
        places = np.full(total, -1, dtype=np.int64)
        places[: len(whole)] = np.arange(len(whole))
        return whole.take(places)

    @staticmethod
    def row_indices(logprobs: Sequence[float]) -> np.ndarray:
        """`[T]` int64 indices into the table; -1 where a log-prob was not recorded (an observation token)."""
        return np.fromiter((getattr(x, "row", -1) for x in logprobs), dtype=np.int64, count=len(logprobs))
