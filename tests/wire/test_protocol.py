"""Messages: what goes in comes out, and what is not a message is refused by name."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_support_replay.traces.support import SupportRows
from trl_support_replay.wire import protocol
from trl_support_replay.wire.arrays import pack, unpack
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
        rows = [[token, *sorted(row - {token})] for token, row in zip(tokens, rows, strict=True)]
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
    assert encode_samples(request.request_id, decoded) == body


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
    # What is let through is a proper answer in its only spelling: its digest tells whether it is the one that was sent.
    assert encode_samples(request.request_id, decoded) == bytes(body)
    for sample in decoded:
        assert len(sample.token_ids) == len(sample.logprobs)
        if request.support:
            assert sample.support.contains(sample.token_ids).all()
            sample.support.validate(sampled_ids=sample.token_ids)


@settings(deadline=None)
@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers(-(2**63), 2**63 - 1) | st.text(), st.lists).map(orjson.dumps)
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


def altered(**changes):
    """The answer to `EXAMPLE` with some top-level keys replaced."""
    return orjson.dumps({**orjson.loads(encode_samples("r", ANSWER)), **changes})


def repacked(**changes):
    """The answer to `EXAMPLE` with some of its arrays replaced, and `None` for "left out"."""
    message = orjson.loads(encode_samples("r", ANSWER))
    arrays = unpack(message["fields"])
    arrays = {name: value for name, value in {**arrays, **changes}.items() if value is not None}
    return orjson.dumps({**message, "fields": pack(arrays)})


def ids(*values):
    return np.array(values, np.int16 if min(values) < 0 else np.uint8)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (altered(version=2), "version=2"),
        (altered(request_id="other"), "answer to request other"),
        (altered(finish_reasons=["stop"]), "finish_reasons has 1 entries for 2"),
        (altered(finish_reasons=["stop", "abort"]), "finish_reasons.1.='abort'"),
        (altered(repaired=[0]), "repaired has 1 entries for 2"),
        (altered(repaired=[0, -1]), "repaired"),
        (altered(repaired=[0, "x"]), "repaired"),
        (altered(routes_start=1), "routes_start=1; 0 was asked for"),
        (altered(surprise=1), "surprise is not known"),
        (orjson.dumps(dict(reversed(orjson.loads(encode_samples("r", ANSWER)).items()))), "come in another order"),
        (encode_samples("r", ANSWER) + b" ", "in another spelling"),
        (repacked(surprise=np.zeros(1, np.uint8)), "fields holds .*surprise; in this order, only"),
        (repacked(lengths=np.array([2, 2], np.uint16)), "lengths is uint16, and its values fit uint8"),
        (altered(fields=[]), "fields="),
        (repacked(lengths=np.array([2], np.uint8)), "lengths has 1 entries for 2"),
        (repacked(lengths=np.array([2, 3], np.uint8)), "lengths add up to 5, and logprobs has 4"),
        (repacked(lengths=np.array([5, -1], np.int8)), "lengths add up to 4"),
        (repacked(lengths=np.array([2.0, 2.0], np.float32)), "lengths is float32"),
        (repacked(logprobs=np.zeros(3, np.float32)), "lengths add up to 4, and logprobs has 3"),
        (repacked(logprobs=np.array([0, 0, np.nan, 0], np.float32)), "not log-probabilities"),
        (repacked(logprobs=np.array([0, 0, 0.5, 0], np.float32)), "not log-probabilities"),
        (repacked(logprobs=np.array([0, 0, -np.inf, 0], np.float32)), "not log-probabilities"),
        (repacked(support_ids=None), "no support_ids"),
        (repacked(support_sizes=np.array([3, 2, 3], np.uint8)), "support_sizes has 3 entries for 4"),
        (repacked(support_sizes=np.array([3, 2, 3, 1], np.uint8)), "support_sizes add up to 9"),
        (repacked(support_sizes=np.array([5, 0, 3, 2], np.uint8)), r"support_sizes.1.=0; a row holds its sampled"),
        (repacked(support_sizes=np.array([2, 2, 2, 2], np.uint8)), "4 times 2; sizes that are all alike travel once"),
        (repacked(support_sizes=np.array([2], np.uint8)), "support_sizes add up to 8"),
        (repacked(support_ids=ids(3, 12, 9, 4, 1, 3, 9, 12, 4, 1)), "do not ascend"),
        (repacked(support_ids=ids(3, 9, 9, 4, 1, 3, 9, 12, 4, 1)), "do not ascend"),
        (repacked(support_ids=ids(3, 3, 12, 4, 1, 3, 9, 12, 4, 1)), "holds its sampled token twice"),
        (repacked(support_ids=ids(-3, 9, 12, 4, 1, 3, 9, 12, 4, 1)), "do not ascend"),
        (repacked(support_ids=np.array([[3, 9], [1, 4]] * 2, np.uint8)), r"support_ids is uint8 of shape \(4, 2\)"),
        (repacked(route_rows=np.array([3, 2], np.uint8)), "route_rows add up to 5, and routes has 6"),
        (repacked(route_rows=np.array([4, 2], np.uint8)), "Sample 0 has 4 rows of routes; 3 tokens entered"),
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
        ({"n": True}, "n=True"),
        ({"n": "1"}, "n='1'"),
        ({"sampling": []}, "sampling="),
        ({"routes_start": 1.5}, "routes_start=1.5"),
        ({"support": 1}, "support=1"),
        ({"request_id": None}, "request_id=None"),
        ({"fields": {}}, "no prompt_ids"),
        ({"extra": 0}, "extra is not known"),
    ],
)
def test_requests_of_another_form_are_refused_by_name(changes, says):
    body = orjson.dumps({**orjson.loads(encode_request(EXAMPLE)), **changes})
    with pytest.raises(MessageError, match=says):
        decode_request(body)


def test_an_empty_prompt_is_refused():
    with pytest.raises(MessageError, match="nothing to continue"):
        decode_request(encode_request(replace(EXAMPLE, prompt_ids=np.zeros(0, np.int32))))
