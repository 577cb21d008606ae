"""Finds the longest known beginning of a token sequence."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")


class PrefixIndex(Generic[T]):
    """Values by token sequence, looked up by any sequence that begins with it.

    Args:
        capacity: number of sequences that are kept; the ones used longest ago go first.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._values: OrderedDict[bytes, tuple[int, T]] = OrderedDict()  # digest -> length, value
        self._lengths: dict[int, int] = {}  # length -> number of sequences of this length

    def __len__(self) -> int:
        return len(self._values)

    def longest(self, token_ids: Any) -> T | None:
        """Value of the longest known sequence that `token_ids` `[N]` begins with, itself included."""
        ids = np.ascontiguousarray(token_ids, dtype=np.int32)
        hasher, done, found = hashlib.blake2b(digest_size=16), 0, None
        for length in sorted(n for n in self._lengths if n <= len(ids)):
            hasher.update(ids[done:length].tobytes())
            done = length
            key = hasher.digest()
            found = key if key in self._values else found
        if found is None:
            return None
        self._values.move_to_end(found)
        return self._values[found][1]

    def put(self, token_ids: Any, value: T) -> None:
        """Remember `value` for `token_ids` `[N]`."""
        ids = np.ascontiguousarray(token_ids, dtype=np.int32)
        key = hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
        if key not in self._values:
            self._lengths[len(ids)] = self._lengths.get(len(ids), 0) + 1
        self._values[key] = (len(ids), value)
        self._values.move_to_end(key)
        if len(self._values) > self._capacity:
            _, (length, _) = self._values.popitem(last=False)
            self._lengths[length] -= 1
            if not self._lengths[length]:
                del self._lengths[length]

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()
        self._lengths.clear()
