"""Arrays inside a JSON message: little-endian bytes in base64, with data type and shape."""

from __future__ import annotations

import binascii
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "int8", "uint16", "int16", "int32", "float32")}


def pack(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """JSON form of named arrays."""
    packed = {}
    for name, array in arrays.items():
        data = np.ascontiguousarray(array, dtype=_DTYPES[array.dtype.name]).tobytes()
        packed[name] = {
            "dtype": array.dtype.name,
            "shape": list(array.shape),
            "data": binascii.b2a_base64(data, newline=False).decode(),
        }
    return packed


def unpack(packed: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Arrays of their JSON form, read-only.

    Raises:
        ValueError: naming the array, for an unknown type, a shape that is not one, or another number of bytes than type
            and shape have.
    """
    arrays = {}
    for name, entry in packed.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data"}:
            raise ValueError(f"{name} is not an object of dtype, shape and data.")
        dtype, shape, text = entry["dtype"], entry["shape"], entry["data"]
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise ValueError(f"{name}: dtype={dtype!r} is not one of {', '.join(_DTYPES)}.")
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape) or len(shape) > 8:
            raise ValueError(f"{name}: shape={shape!r} is not a list of at most 8 sizes.")
        if not isinstance(text, str):
            raise ValueError(f"{name}: data is a {type(text).__name__}, not base64.")
        try:
            data = binascii.a2b_base64(text, strict_mode=True)
        except ValueError as error:
            raise ValueError(f"{name}: data is not base64 ({error}).") from None
        expected = math.prod(shape) * _DTYPES[dtype].itemsize
        if len(data) != expected:
            raise ValueError(f"{name}: {len(data)} bytes, where {dtype} of shape {shape} has {expected}.")
        arrays[name] = np.frombuffer(data, dtype=_DTYPES[dtype]).reshape(shape)
    return arrays


def smallest(values: Any) -> np.ndarray:
    """Integers in the smallest of the unsigned types, or int32, that holds them."""
    array = np.asarray(values)
    low, high = int(array.min(initial=0)), int(array.max(initial=0))
    if low >= 0 and high < 1 << 16:
        return array.astype(np.uint8 if high < 1 << 8 else np.uint16)
    if low < -(1 << 31) or high >= 1 << 31:
        raise ValueError(f"Integers from {low} to {high} do not fit an int32.")
    return array.astype(np.int32)
