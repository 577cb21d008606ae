"""Arrays inside a binary message: little-endian bytes, with data type and shape.

Nothing is unpickled, and no size is believed before the bytes are there: an array that is read shares the memory of the
message.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
import numpy as np

_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "int8", "uint16", "int16", "int32", "float32")}
_MAX_DIMS = 8


class MessageError(ValueError):
    """A body that is not what its sender wrote, or not a message of this protocol."""


class Array(msgspec.Struct, frozen=True, array_like=True):
    """An array as it travels.

    Attributes:
        dtype: name of a NumPy type, one of `uint8`, `int8`, `uint16`, `int16`, `int32` and `float32`.
        shape: its sizes.
        data: its elements in C order.
    """

    dtype: str
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=_MAX_DIMS)]
    data: memoryview

    @classmethod
    def of(cls, array: np.ndarray) -> Array:
        """Raises: `ValueError` for a type that the format does not have."""
        if array.dtype.name not in _DTYPES:
            raise ValueError(f"dtype={array.dtype.name!r} is not one of {', '.join(_DTYPES)}.")
        return cls(array.dtype.name, list(array.shape), _bytes_of(array))

    def read(self, name: str, kinds: str, ndim: int) -> np.ndarray:
        """The array, read-only.

        Args:
            name: what the error calls it.
            kinds: kinds of NumPy types that are accepted: `"iu"` for integers, `"f"`.
            ndim: number of dimensions.

        Raises:
            MessageError: another type, kind or number of dimensions, or another number of bytes than those have.
        """
        if self.dtype not in _DTYPES:
            raise MessageError(f"{name}: dtype={self.dtype!r} is not one of {', '.join(_DTYPES)}.")
        dtype = _DTYPES[self.dtype]
        if dtype.kind not in kinds or len(self.shape) != ndim:
            raise MessageError(f"{name} is {self.dtype} of shape {self.shape}.")
        # Python integers: a product of sizes cannot overflow.
        expected = math.prod(self.shape) * dtype.itemsize
        if len(self.data) != expected:
            raise MessageError(
                f"{name}: {len(self.data)} bytes, where {self.dtype} of shape {self.shape} has {expected}."
            )
        try:
            return np.frombuffer(self.data, dtype=dtype).reshape(self.shape)
        except ValueError as error:  # no elements, and yet a size beyond what NumPy can hold
            raise MessageError(f"{name}: shape={self.shape} is not one of an array ({error}).") from None


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array, dtype=_DTYPES[array.dtype.name]).reshape(-1).view(np.uint8).data


def smallest(values: Any) -> np.ndarray:
    """Integers in the smallest of the unsigned types, or int32, that holds them.

    Raises:
        ValueError: integers that do not fit an int32.
    """
    array = np.asarray(values)
    low, high = int(array.min(initial=0)), int(array.max(initial=0))
    if low >= 0 and high < 1 << 16:
        return array.astype(np.uint8 if high < 1 << 8 else np.uint16, copy=False)
    if low < -(1 << 31) or high >= 1 << 31:
        raise ValueError(f"Integers from {low} to {high} do not fit an int32.")
    return array.astype(np.int32, copy=False)


def read(array: Array | None, name: str, kinds: str = "iu", ndim: int = 1) -> np.ndarray:
    """`Array.read`, of an array that must be there."""
    if array is None:
        raise MessageError(f"{name} is missing.")
    return array.read(name, kinds, ndim)


def ends_of(sizes: np.ndarray, count: int, total: int, name: str, values: str) -> np.ndarray:
    """`[count + 1]` int64 offsets of runs of `sizes`, which must make up `total` values."""
    given = sizes.astype(np.int64)
    if len(given) != count:
        raise MessageError(f"{name} has {len(given)} entries for {count} rows.")
    ends = np.concatenate([[0], np.cumsum(given)])
    if (given < 0).any() or ends[-1] != total:
        raise MessageError(f"{name} add up to {ends[-1]}, and {values} has {total} rows.")
    return ends
