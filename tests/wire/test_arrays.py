"""Arrays: the same bits behind the wire, and names for whatever is none."""

import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_support_replay.wire.arrays import Array, MessageError, smallest

TYPES = ("uint8", "int8", "uint16", "int16", "int32", "float32")


@st.composite
def arrays(draw):
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    dtype = np.dtype(draw(st.sampled_from(TYPES)))
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype=dtype).reshape(shape)


def travelled(array):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(Array.of(array)), type=Array)


@settings(deadline=None)
@given(arrays())
def test_arrays_survive_bit_by_bit(sent):
    received = travelled(sent).read("x", sent.dtype.kind, sent.ndim)
    assert received.dtype == sent.dtype and received.shape == sent.shape
    assert received.tobytes() == sent.tobytes() and not received.flags.writeable


def test_strided_and_foreign_byte_orders_travel_as_their_values():
    table = np.arange(12, dtype=">i4").reshape(3, 4)
    assert travelled(table.T).read("t", "i", 2).tolist() == table.T.tolist()
    assert travelled(table[:, 1]).read("column", "i", 1).tolist() == [1, 5, 9]


def test_the_bytes_are_little_endian():
    assert msgspec.msgpack.encode(Array.of(np.array([1, 258], np.uint16))) == (
        b"\x93\xa6uint16\x91\x02\xc4\x04\x01\x00\x02\x01"
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "object"}, "ids: dtype='object' is not one of uint8"),
        ({"dtype": "int64"}, "ids: dtype='int64'"),
        ({"dtype": "float32"}, r"ids is float32 of shape \[3\]"),
        ({"shape": [3, 1]}, r"ids is uint8 of shape \[3, 1\]"),
        ({"shape": [2]}, r"ids: 3 bytes, where uint8 of shape \[2\] has 2"),
        ({"shape": [2**63]}, f"has {2**63}"),
        ({"dtype": "uint16"}, r"3 bytes, where uint16 of shape \[3\] has 6"),
    ],
)
def test_arrays_that_are_none_are_refused_by_name(changes, says):
    entry = {"dtype": "uint8", "shape": [3], "data": memoryview(b"\0\0\0"), **changes}
    with pytest.raises(MessageError, match=says):
        Array(**entry).read("ids", "iu", 1)


def test_a_shape_beyond_what_an_array_can_have_is_refused():
    with pytest.raises(MessageError, match="is not one of an array"):
        Array("uint8", [0, 2**63], memoryview(b"")).read("ids", "iu", 2)


@pytest.mark.parametrize("shape", [[-3], [3.0], [True, 3], 3, [1] * 9])
def test_shapes_of_another_form_do_not_decode(shape):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(["uint8", shape, b"\0\0\0"]), type=Array)


def test_a_type_that_the_format_lacks_is_refused_by_name():
    with pytest.raises(ValueError, match="dtype='int64' is not one of"):
        Array.of(np.zeros(2, np.int64))


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([], "uint8"),
        ([0, 255], "uint8"),
        ([256], "uint16"),
        ([65535], "uint16"),
        ([65536], "int32"),
        ([2**31 - 1], "int32"),
        ([-1], "int32"),
        ([-(2**31), 5], "int32"),
    ],
)
def test_ids_take_the_smallest_type(values, dtype):
    array = smallest(np.array(values, dtype=np.int64))
    assert array.dtype == dtype and array.tolist() == values


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_ids_beyond_int32_are_refused(value):
    with pytest.raises(ValueError, match=f"{value}.* do not fit an int32"):
        smallest([0, value])


def test_reading_takes_no_memory_for_what_is_only_claimed():
    body = msgspec.msgpack.encode(Array.of(np.zeros(3_000_000, np.uint8)))
    tracemalloc.start()
    try:
        msgspec.msgpack.decode(body, type=Array).read("ids", "iu", 1)
        _, used = tracemalloc.get_traced_memory()
        with pytest.raises(MessageError, match="3 bytes"):
            Array("uint8", [2**40], memoryview(b"\0\0\0")).read("ids", "iu", 1)
        _, used_by_lie = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 100_000 and used_by_lie < 100_000  # the array shares the memory of the message
