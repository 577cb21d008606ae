import random
import subprocess
import sys
import tracemalloc

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_support_replay.wire.arrays import WireError, dumps, loads, pack, smallest, unpack

TYPES = ("uint8", "int8", "uint16", "int16", "int32", "float32")


@st.composite
def arrays(draw):
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    dtype = np.dtype(draw(st.sampled_from(TYPES)))
    data = draw(st.binary(min_size=int(np.prod(shape)) * dtype.itemsize, max_size=int(np.prod(shape)) * dtype.itemsize))
    return np.frombuffer(data, dtype=dtype).reshape(shape)


messages = st.dictionaries(st.text(max_size=4), arrays(), max_size=4)


@settings(deadline=None)
@given(messages)
def test_arrays_survive_bit_by_bit(sent):
    body = dumps(pack(sent))
    received = unpack(loads(body))
    assert list(received) == list(sent)
    for name, array in sent.items():
        assert received[name].dtype == array.dtype and received[name].shape == array.shape
        assert received[name].tobytes() == array.tobytes()
        assert not received[name].flags.writeable
    assert dumps(pack(received)) == body


def test_strided_and_foreign_byte_orders_travel_as_their_values():
    table = np.arange(12, dtype=">i4").reshape(3, 4)
    received = unpack(loads(dumps(pack({"t": table.T, "column": table[:, 1]}))))
    assert received["t"].tolist() == table.T.tolist() and received["column"].tolist() == [1, 5, 9]
    assert pack({"t": table})["t"]["data"] == pack({"t": table.astype("<i4")})["t"]["data"]


def test_the_bytes_are_little_endian_base64():
    assert dumps(pack({"ids": np.array([1, 258], np.uint16)})) == (
        b'{"ids":{"dtype":"uint16","shape":[2],"data":"AQACAQ=="}}'
    )


def check_decoder(body: bytes) -> None:
    """Whatever the bytes: a `WireError`, or arrays that encode to these bytes again."""
    try:
        message = loads(body)
        if not isinstance(message, dict):
            return
        received = unpack(message)
    except WireError:
        return
    assert dumps(pack(received)) == body


def mutated(body: bytes, rng: random.Random) -> bytes:
    data = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0 if place < len(data):
                data[place] ^= 1 << rng.randrange(8)
            case 1:
                data[place:place] = rng.choice(
                    [b" ", b"=", b"A", b"0", b"-", b"[", b'"', b"\\u0041", b"1e9", b"9" * 20]
                )
            case 2:
                del data[place : place + rng.randint(1, 8)]
            case 3:
                data[place:place] = data[rng.randrange(len(data) + 1) :][: rng.randint(1, 40)]
            case 4:
                del data[place:]
    return bytes(data)


@settings(deadline=None, max_examples=400)
@given(messages, st.integers(0, 2**32))
def test_damaged_bytes_are_an_error_or_another_message_in_its_only_spelling(sent, seed):
    rng = random.Random(seed)
    for _ in range(5):
        check_decoder(mutated(dumps(pack(sent)), rng))


@settings(deadline=None)
@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.sampled_from(TYPES),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["dtype", "shape", "data", "x"]), inner),
        max_leaves=20,
    ).map(orjson.dumps)
)
def test_any_bytes_are_an_error_or_a_message(body):
    check_decoder(body)


def entry(**changes):
    return {"ids": {"dtype": "uint8", "shape": [3], "data": "AAAA", **changes}}


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (entry(dtype="object"), "ids: dtype='object' is not one of uint8"),
        (entry(dtype="int64"), "ids: dtype='int64'"),
        (entry(dtype=None), "ids: dtype=None"),
        (entry(shape=[-3]), r"ids: shape=\[-3\]"),
        (entry(shape=[3.0]), r"ids: shape=\[3.0\]"),
        (entry(shape=[True, 3]), "ids: shape="),
        (entry(shape=3), "ids: shape=3"),
        (entry(shape=[1] * 9), "at most 8 sizes"),
        (entry(shape=[2]), r"ids: 3 bytes, where uint8 of shape \[2\] has 2"),
        (entry(shape=[2**32, 2**32]), f"has {2**64}"),
        (entry(shape=[0, 2**63], data=""), "is not one of an array"),
        (entry(dtype="uint16"), r"3 bytes, where uint16 of shape \[3\] has 6"),
        (entry(data="AAA"), "ids: data is not base64"),
        (entry(data="AA A"), "ids: data is not base64"),
        (entry(data="AAAé"), "ids: data is not base64"),
        (entry(data="AAAA=", shape=[3]), "ids: data ends in 'AAA='"),
        (entry(data="AB==", shape=[1]), "ids: data ends in 'AB=='"),
        (entry(data="AAB=", shape=[2]), "ids: data ends in 'AAB='"),
        (entry(data=7), "ids: data is a int"),
        (entry(more=1), "ids is not an object of dtype, shape and data"),
        ({"ids": [1, 2]}, "ids is not an object"),
        ({"ids": {"shape": [3], "dtype": "uint8", "data": "AAAA"}}, "in this order"),
    ],
)
def test_arrays_that_are_none_are_refused_by_name(message, says):
    with pytest.raises(WireError, match=says):
        unpack(message)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "body of 0 bytes is not JSON"),
        (b'{"a":', "body of 5 bytes is not JSON"),
        (b'{"a": 1}', r"8 bytes is JSON in another spelling than its sender's \(7 bytes\)"),
        (b'{"a":1,"a":2}', "another spelling"),
        (b'{"a":1e0}', "another spelling"),
        (b'{"\\u0061":1}', "another spelling"),
        (b'{"a":NaN}', "is not JSON"),
        (b'"\xff"', "is not JSON"),
    ],
)
def test_json_in_another_spelling_is_refused(body, says):
    with pytest.raises(WireError, match=says):
        loads(body)


def test_a_type_that_the_format_lacks_is_refused_by_name():
    with pytest.raises(ValueError, match="ids: dtype='int64' is not one of"):
        pack({"ids": np.zeros(2, np.int64)})


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


def test_decoding_allocates_in_proportion_to_the_body():
    body = dumps(pack({"ids": np.zeros(3_000_000, np.uint8)}))
    tracemalloc.start()
    try:
        unpack(loads(body))
        unbelievable = dumps(entry(shape=[2**40]))
        _, used = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        with pytest.raises(WireError, match="3 bytes"):
            unpack(loads(unbelievable))
        _, used_by_lie = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The JSON parser takes twelve times the body by itself.
    assert used < 16 * len(body) and used_by_lie < 100_000


@pytest.mark.slow
@pytest.mark.needs("atheris")
def test_a_minute_of_fuzzing_finds_nothing():
    """Atheris guides its mutations by coverage."""
    done = subprocess.run([sys.executable, __file__, "-max_total_time=60"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    import atheris

    atheris.instrument_all()
    atheris.Setup(sys.argv, check_decoder)
    atheris.Fuzz()
