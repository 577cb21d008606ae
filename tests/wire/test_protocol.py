"""Messages: what goes in comes out, and what is not a message is refused by name."""

from __future__ import annotations

from dataclasses import fields, replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_support_replay.traces.support import SupportRows
from trl_support_replay.wire import protocol
from trl_support_replay.wire.arrays import Array
from trl_support_replay.wire.protocol import (
    GenerateRequest,
    MessageError,
    Sample,
    decode_request,
    decode_samples,
    encode_request,
    encode_samples,
)


def same(a, b):
    for field in fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, np.ndarray):
            np.testing.assert_array_equal(x, y)
        else:
            assert x == y, field.name
    return True


@st.composite
def requests(draw):
    return GenerateRequest(
        request_id=draw(st.text(min_size=1, max_size=8)),
        prompt_ids=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9)), dtype=np.int32),
        n=draw(st.integers(1, 4)),
        sampling=draw(st.dictionaries(st.text(max_size=5), st.integers(-5, 5) | st.none() | st.floats(0, 1))),
        support=draw(st.booleans()),
        routes_start=draw(st.none() | st.integers(0, 3)),
        weights_version=draw(st.none() | st.text(max_size=5)),
    )


@st.composite
def exchanges(draw):
    """A request and samples that answer it; ids of any size, so that every width on the wire is met."""
    request = draw(requests())
    request = replace(request, routes_start=None if request.routes_start is None else min(request.routes_start, 1))
    largest = draw(st.sampled_from([200, 60_000, 2**31 - 1]))
    ids = st.integers(0, largest)
    samples = []
    layers, k = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    for _ in range(request.n):
        rows = draw(st.lists(st.sets(ids, min_size=1, max_size=draw(st.integers(1, 6))), min_size=1, max_size=5))
        tokens = [draw(st.sampled_from(sorted(row))) for row in rows]
        rows = [sorted(row) for row in rows]
        start = request.routes_start or 0
        routes = None
        if request.routes_start is not None:
            count = len(request.prompt_ids) + len(rows) - 1 - start
            routes = draw(st.integers(0, 70_000)) * np.ones((max(count, 0), layers, k), dtype=np.int32)
        samples.append(
            Sample(
                token_ids=np.array(tokens, dtype=np.int32),
                logprobs=-np.array(draw(st.lists(st.floats(0, 80, width=32), min_size=len(rows), max_size=len(rows)))),
                support=SupportRows.from_ragged(rows) if request.support else None,
                routes=routes,
                routes_start=start,
                finish_reason=draw(st.sampled_from(["stop", "length"])),
                repaired=draw(st.integers(0, 3)),
                weights_version=request.weights_version,
            )
        )
    return request, samples


@settings(deadline=None)
@given(requests())
def test_requests_survive_the_wire(request):
    body = encode_request(request)
    assert same(decode_request(body), request)
    assert encode_request(decode_request(body)) == body


@settings(deadline=None)
@given(exchanges())
def test_samples_survive_the_wire(exchange):
    request, samples = exchange
    body = encode_samples(request.request_id, samples)
    decoded = decode_samples(body, request)
    for sent, received in zip(samples, decoded, strict=True):
        assert same(replace(sent, logprobs=sent.logprobs.astype(np.float32)), received)


@settings(deadline=None)
@given(exchanges(), st.data())
def test_damaged_messages_raise_message_errors_and_nothing_else(exchange, data):
    request, samples = exchange
    body = bytearray(encode_samples(request.request_id, samples))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(body) - 1))
        action = data.draw(st.sampled_from(["flip", "delete", "cut"]))
        if action == "flip":
            body[place] ^= 1 << data.draw(st.integers(0, 7))
        elif action == "delete":
            del body[place]
        else:
            del body[place:]
        if not body:
            break
    try:
        decoded = decode_samples(bytes(body), request)
    except MessageError:
        return
    # What is let through is a proper answer: its digest tells whether it is the one that was sent.
    for sample in decoded:
        assert len(sample.token_ids) == len(sample.logprobs)
        if request.support:
            assert sample.support.contains(sample.token_ids).all()
            sample.support.validate(sampled_ids=sample.token_ids)


@settings(deadline=None)
@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers(-(2**63), 2**63 - 1) | st.text(), st.lists).map(msgspec.msgpack.encode)
)
def test_any_bytes_are_refused_as_a_message(body):
    for decode in (decode_request, protocol.decode_version, lambda b: decode_samples(b, EXAMPLE)):
        with pytest.raises(MessageError):
            decode(body)
    assert set(protocol.decode_error(body)) >= {"code", "message"}


EXAMPLE = GenerateRequest("r", np.array([1, 2], np.int32), n=2, routes_start=0)
ANSWER = [
    Sample(
        np.array([3, 4], np.int32),
        np.array([-0.5, -0.25], np.float32),
        SupportRows.from_ragged([[3, 9, 12], [4, 1]]),
        np.zeros((3, 2, 1), np.uint8),
        0,
        "stop",
        0,
        "v",
    )
] * 2


def raw(body):
    return msgspec.msgpack.decode(body)


def altered(**changes):
    """The answer to `EXAMPLE` with some fields replaced, and `None` for "left out"."""
    message = {**raw(encode_samples("r", ANSWER)), **changes}
    return msgspec.msgpack.encode({name: value for name, value in message.items() if value is not None})


def array(*values, dtype=None):
    """As it travels."""
    values = np.array(values, dtype or (np.int16 if min(values) < 0 else np.uint8))
    return msgspec.to_builtins(Array.of(values), builtin_types=(memoryview,))


def ids(*values):
    """The ids beside the sampled ones 3, 4, 3, 4, whose rows have 3, 2, 3 and 2 ids."""
    return {"plain": array(*values)}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (altered(version=[1, 0]), "version=1.0; this end speaks 2.0"),
        (altered(version=2), "not a message: .*version"),
        (altered(request_id="other"), "answer to request other"),
        (altered(finish_reasons=["stop"]), "finish_reasons has 1 entries for 2"),
        (altered(finish_reasons=["stop", "abort"]), "finish_reasons"),
        (altered(repaired=[0]), "repaired has 1 entries for 2"),
        (altered(repaired=[0, -1]), "repaired"),
        (altered(repaired=[0, "x"]), "repaired"),
        (altered(routes_start=1), "routes_start=1; 0 was asked for"),
        (encode_samples("r", ANSWER) + b" ", "not a message"),
        (altered(lengths=[]), "lengths"),
        (altered(lengths=array(2)), "lengths has 1 entries for 2"),
        (altered(lengths=array(2, 3)), "lengths add up to 5, and logprobs has 4"),
        (altered(lengths=array(5, -1)), "lengths add up to 4"),
        (altered(lengths=array(2.0, 2.0, dtype=np.float32)), "lengths is float32"),
        (altered(logprobs=array(0, 0, 0, dtype=np.float32)), "4 token_ids came with 3 logprobs"),
        (altered(logprobs=array(0, 0, np.nan, 0, dtype=np.float32)), "not log-probabilities"),
        (altered(logprobs=array(0, 0, 0.5, 0, dtype=np.float32)), "not log-probabilities"),
        (altered(logprobs=array(0, 0, -np.inf, 0, dtype=np.float32)), "not log-probabilities"),
        (altered(token_ids=array(3, 4, 3, -4)), "token_ids holds -4"),
        (altered(support_ids=None), "support_ids is missing"),
        (altered(support_ids={}), "support_ids.distances is missing"),
        (altered(support_sizes=None), "support_sizes is missing"),
        (altered(support_sizes=array(3, 2, 3)), "support_sizes has 3 entries for 4"),
        (altered(support_sizes=array(3, 2, 3, 1)), "support_sizes add up to 5, and support_ids has 6"),
        (altered(support_sizes=array(5, 0, 3, 2)), r"support_sizes.1.=0; a row holds its sampled"),
        (altered(support_sizes=array(2)), "support_sizes add up to 4"),
        (altered(support_ids=ids(12, 9, 1, 9, 12, 1)), "do not ascend"),
        (altered(support_ids=ids(9, 9, 1, 9, 12, 1)), "do not ascend"),
        (altered(support_ids=ids(3, 12, 1, 9, 12, 1)), "holds its sampled token twice"),
        (altered(support_ids=ids(-3, 9, 1, 9, 12, 1)), "do not ascend"),
        (altered(route_rows=array(3, 2)), "route_rows add up to 5, and routes has 6"),
        (altered(route_rows=array(4, 2)), "Sample 0 has 4 rows of routes; 3 tokens entered"),
        (altered(routes=None), "routes is missing"),
    ],
)
def test_answers_that_do_not_fit_are_refused_by_name(body, says):
    with pytest.raises(MessageError, match=says):
        decode_samples(body, EXAMPLE)


def test_another_version_of_the_weights_is_refused():
    body = encode_samples("r", ANSWER)
    assert decode_samples(body, replace(EXAMPLE, weights_version="v"))[0].weights_version == "v"
    with pytest.raises(MessageError, match="come from weights v, and w was asked for"):
        decode_samples(body, replace(EXAMPLE, weights_version="w"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n": True}, r"\$.n"),
        ({"n": "1"}, r"\$.n"),
        ({"sampling": []}, r"\$.sampling"),
        ({"routes_start": 1.5}, r"\$.routes_start"),
        ({"support": 1}, r"\$.support"),
        ({"request_id": None}, r"\$.request_id"),
        ({"prompt_ids": 5}, r"\$.prompt_ids"),
    ],
)
def test_requests_of_another_form_are_refused_by_name(changes, says):
    body = msgspec.msgpack.encode({**raw(encode_request(EXAMPLE)), **changes})
    with pytest.raises(MessageError, match=says):
        decode_request(body)


def test_an_empty_prompt_is_refused():
    with pytest.raises(MessageError, match="nothing to continue"):
        decode_request(encode_request(replace(EXAMPLE, prompt_ids=np.zeros(0, np.int32))))


def test_fields_of_a_later_minor_version_are_skipped():
    later = {"version": [2, 7], "surprise": {"of": [1, 2]}}
    assert same(decode_request(msgspec.msgpack.encode({**raw(encode_request(EXAMPLE)), **later})), EXAMPLE)
    for sent, received in zip(ANSWER, decode_samples(altered(**later), EXAMPLE), strict=True):
        assert same(replace(sent, support=SupportRows.from_ragged([[3, 9, 12], [1, 4]])), received)


def test_long_rows_travel_packed():
    rng = np.random.default_rng(0)
    rows = SupportRows.from_ragged([np.sort(rng.choice(49_152, 500, replace=False)) for _ in range(50)])
    tokens = np.array([rng.choice(row) for row in rows], dtype=np.int32)
    sample = Sample(tokens, np.zeros(50, np.float32), rows, None, 0, "stop", 0, None)
    body = encode_samples("r", [sample])
    assert len(body) / rows.nnz < 1.25
    assert decode_samples(body, replace(EXAMPLE, n=1, routes_start=None))[0].support == rows
