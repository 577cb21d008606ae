"""Arrays inside a JSON message: little-endian bytes in base64, with data type and shape.

There is exactly one way to write a given message: JSON without white space or repeated keys, base64 with its one
correct ending. So whatever is accepted encodes to the very bytes that were received, and an altered byte is either an
error or another value, never a second spelling of the same one. Nothing is unpickled, and no size is believed before
the bytes are there: decoding allocates in proportion to the body.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "int8", "uint16", "int16", "int32", "float32")}
_MAX_DIMS = 8


class WireError(ValueError):
    """Bytes that no sender of this format wrote: cut short, altered, or of another format."""


def dumps(message: Any) -> bytes:
    """A JSON value as bytes, in its one spelling."""
    return orjson.dumps(message)


def loads(body: bytes) -> Any:
    """The JSON value in `body`.

    Raises:
        WireError: not JSON, or not in the spelling of `dumps`.
    """
    try:
        message = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise WireError(f"The body of {len(body)} bytes is not JSON: {error}.") from None
    again = orjson.dumps(message)
    if again != body:
        raise WireError(
            f"The body of {len(body)} bytes is JSON in another spelling than its sender's ({len(again)} bytes): "
            "it has white space, repeated keys, or numbers and strings written differently."
        )
    return message


def pack(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """JSON form of named arrays.

    Raises:
        ValueError: naming the array, for a type that the format does not have.
    """
    packed = {}
    for name, array in arrays.items():
        if array.dtype.name not in _DTYPES:
            raise ValueError(f"{name}: dtype={array.dtype.name!r} is not one of {', '.join(_DTYPES)}.")
        data = np.ascontiguousarray(array, dtype=_DTYPES[array.dtype.name]).data
        packed[name] = {
            "dtype": array.dtype.name,
            "shape": list(array.shape),
            "data": binascii.b2a_base64(data, newline=False).decode(),
        }
    return packed


def unpack(packed: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Arrays of their JSON form, read-only, each decoded once.

    Raises:
        WireError: naming the array, for an unknown type, a shape that is not one, another number of bytes than type and
            shape have, or base64 that is not canonical.
    """
    return {name: _unpack_one(name, entry) for name, entry in packed.items()}


def _unpack_one(name: str, entry: Any) -> np.ndarray:
    if not isinstance(entry, dict) or list(entry) != ["dtype", "shape", "data"]:
        raise WireError(f"{name} is not an object of dtype, shape and data, in this order.")
    dtype, shape, text = entry["dtype"], entry["shape"], entry["data"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise WireError(f"{name}: dtype={dtype!r} is not one of {', '.join(_DTYPES)}.")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(type(n) is int and n >= 0 for n in shape):
        raise WireError(f"{name}: shape={shape!r} is not a list of at most {_MAX_DIMS} sizes.")
    if not isinstance(text, str):
        raise WireError(f"{name}: data is a {type(text).__name__}, not base64.")
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise WireError(f"{name}: data is not base64 ({error}).") from None
    # The strict decoder lets superfluous padding and stray bits in the last group pass.
    last = binascii.b2a_base64(data[len(data) - (len(data) % 3 or 3) :], newline=False).decode() if data else ""
    if len(text) != 4 * math.ceil(len(data) / 3) or not text.endswith(last):
        raise WireError(f"{name}: data ends in {text[-4:]!r}, which is not how base64 of {len(data)} bytes ends.")
    # Python integers: a product of sizes cannot overflow.
    expected = math.prod(shape) * _DTYPES[dtype].itemsize
    if len(data) != expected:
        raise WireError(f"{name}: {len(data)} bytes, where {dtype} of shape {shape} has {expected}.")
    try:
        return np.frombuffer(data, dtype=_DTYPES[dtype]).reshape(shape)
    except ValueError as error:  # no elements, and yet a size beyond what NumPy can hold
        raise WireError(f"{name}: shape={shape!r} is not one of an array ({error}).") from None


def smallest(values: Any) -> np.ndarray:
    """Integers in the smallest of the unsigned types, or int32, that holds them.

    Raises:
        ValueError: integers that do not fit an int32.
    """
    array = np.asarray(values)
    low, high = int(array.min(initial=0)), int(array.max(initial=0))
    if low >= 0 and high < 1 << 16:
        return array.astype(np.uint8 if high < 1 << 8 else np.uint16)
    if low < -(1 << 31) or high >= 1 << 31:
        raise ValueError(f"Integers from {low} to {high} do not fit an int32.")
    return array.astype(np.int32)
