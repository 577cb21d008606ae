"""What client and server say to each other: paths, requests, samples and errors, and their bytes.

A message is one JSON object. Everything with an entry per token is a packed array (`traces.wire`); the rest are plain
JSON values. A message has one spelling: what is accepted encodes to the bytes that came in. A row of a support travels
as its sampled token, so that a row without its token cannot be said, then the other ids in ascending order, which makes
"no id twice" cheap to check. Sizes that are all alike, as with top-k alone, travel once. A header carries the SHA-256
of the message, so one that was cut short or altered on the way is recognised, whatever its content coding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from ..settings.sampling_table.vllm import REQUEST
from ..traces.support import SupportError, SupportRows
from .arrays import WireError, dumps, loads, pack, smallest, unpack

VERSION = 1
PREFIX = "/support_replay/v1"
GENERATE = PREFIX + "/generate"
INFO = PREFIX + "/info"
RELOAD = PREFIX + "/reload_weights"
LABEL = PREFIX + "/label_weights"
DIGEST_HEADER = "x-support-replay-digest"
_ROUNDING = 1e-4

# Of `SamplingParams`, what a request may set, with the kind of its value.
PLAIN_FIELDS = {
    "temperature": "float",
    "top_p": "float",
    "top_k": "int",
    "min_p": "float",
    "max_tokens": "int",
    "min_tokens": "int",
    "seed": "int",
    "stop": "strings",
    "stop_token_ids": "ids",
    "include_stop_str_in_output": "bool",
    "ignore_eos": "bool",
    "skip_special_tokens": "bool",
    "spaces_between_special_tokens": "bool",
    "repetition_penalty": "float",
    "presence_penalty": "float",
    "frequency_penalty": "float",
    "bad_words": "strings",
    "allowed_token_ids": "ids",
    "structured_outputs": "object",
    "thinking_token_budget": "int",
}
# What a request that records supports may set: nothing by which the distribution would not be
# `softmax(logits / temperature)` over a support.
SAMPLING_FIELDS = {name: kind for name, kind in PLAIN_FIELDS.items() if REQUEST[name].replayed}


class MessageError(ValueError):
    """A body that is not what its sender wrote, or not a message of this protocol."""


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt and how to continue it.

    Attributes:
        request_id: unique name, given back with the answer.
        prompt_ids: `[P]` int32 token ids.
        n: number of samples.
        sampling: sampling parameters by name: `SAMPLING_FIELDS`, and without `support` also `PLAIN_FIELDS`.
        support: whether to record supports.
        routes_start: record the routed experts of the tokens from this one on, prompt included; `None` for none.
        weights_version: the version of the weights that must produce the samples; `None` takes what there is.
    """

    request_id: str
    prompt_ids: np.ndarray
    n: int = 1
    sampling: Mapping[str, Any] = field(default_factory=dict)
    support: bool = True
    routes_start: int | None = None
    weights_version: str | None = None


@dataclass(frozen=True)
class Sample:
    """One completion of `T` tokens.

    Attributes:
        token_ids: `[T]` int32.
        logprobs: `[T]` float32, of the sampled tokens, under the distribution they were drawn from.
        support: `T` rows; `None` when no support was asked for.
        routes: `[R, layers, k]` routed expert ids of the tokens from `routes_start` on, or `None`. The last sampled
            token has none, since it never entered the model: `R = prompt + T - 1 - routes_start`, or fewer, when the
            engine has lost some.
        routes_start: the first token, prompt included, that `routes` is about.
        finish_reason: `"stop"` or `"length"`.
        repaired: number of supports that the sampled token had to be put into, or that lack or may lack members.
        weights_version: the weights that produced it; `None` for those that the engine was started with.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    support: SupportRows | None
    routes: np.ndarray | None
    routes_start: int
    finish_reason: str
    repaired: int
    weights_version: str | None


def digest(body: bytes) -> str:
    """Value of the digest header for the message `body`."""
    return hashlib.sha256(body).hexdigest()


def check_digest(body: bytes, header: str | None) -> None:
    """Raise `MessageError` unless `header` is the digest of `body`."""
    if header != digest(body):
        raise MessageError(f"The {len(body)} bytes of the message do not have the digest in its header ({header}).")


def encode_request(request: GenerateRequest) -> bytes:
    """The body that asks for `request`."""
    message = {
        "version": VERSION,
        "request_id": request.request_id,
        "n": request.n,
        "sampling": dict(request.sampling),
        "support": request.support,
        "routes_start": request.routes_start,
        "weights_version": request.weights_version,
        "fields": pack({"prompt_ids": smallest(request.prompt_ids)}),
    }
    return dumps(message)


_REQUEST_KEYS: dict[str, tuple[type, ...]] = {
    "version": (int,),
    "request_id": (str,),
    "n": (int,),
    "sampling": (dict,),
    "support": (bool,),
    "routes_start": (int, type(None)),
    "weights_version": (str, type(None)),
    "fields": (dict,),
}


def decode_request(body: bytes) -> GenerateRequest:
    """The request in `body`.

    Raises:
        MessageError: naming the key that is missing, unknown or of the wrong type.
    """
    message = _message(body, _REQUEST_KEYS)
    fields = _fields(message, {"prompt_ids": ("iu", 1)})
    _check_types(fields)
    prompt_ids = fields["prompt_ids"]
    if len(prompt_ids) == 0:
        raise MessageError("prompt_ids is empty: there is nothing to continue.")
    return GenerateRequest(prompt_ids=prompt_ids.astype(np.int32), **_without(message, "version", "fields"))


def encode_samples(request_id: str, samples: Sequence[Sample]) -> bytes:
    """The body that answers a request with its samples, packed one after the other."""
    packed = {
        "lengths": smallest([len(s.token_ids) for s in samples]),
        "logprobs": np.concatenate([s.logprobs for s in samples]).astype(np.float32),
    }
    token_ids = np.concatenate([s.token_ids for s in samples])
    if samples[0].support is None:
        packed["token_ids"] = smallest(token_ids)
    else:
        rows = SupportRows.concatenate([s.support for s in samples if s.support is not None])
        alike = len(rows) > 1 and bool((rows.sizes == rows.sizes[0]).all())
        packed["support_sizes"] = smallest(rows.sizes[:1] if alike else rows.sizes)
        packed["support_ids"] = smallest(_sampled_first(rows, token_ids))
    if samples[0].routes is not None:
        parts = [s.routes for s in samples if s.routes is not None]
        packed["route_rows"] = smallest([len(part) for part in parts])
        packed["routes"] = smallest(np.concatenate(parts))
    message = {
        "version": VERSION,
        "request_id": request_id,
        "weights_version": samples[0].weights_version,
        "finish_reasons": [s.finish_reason for s in samples],
        "repaired": [s.repaired for s in samples],
        "routes_start": samples[0].routes_start,
        "fields": pack(packed),
    }
    return dumps(message)


_SAMPLES_KEYS: dict[str, tuple[type, ...]] = {
    "version": (int,),
    "request_id": (str,),
    "weights_version": (str, type(None)),
    "finish_reasons": (list,),
    "repaired": (list,),
    "routes_start": (int,),
    "fields": (dict,),
}


def decode_samples(body: bytes, request: GenerateRequest) -> list[Sample]:
    """The `request.n` samples in `body`, which must be the answer to `request` and hold everything it asked for.

    Raises:
        MessageError: for any other body; a support that does not hold its sampled token is such a body.
    """
    message = _message(body, _SAMPLES_KEYS)
    if message["request_id"] != request.request_id:
        raise MessageError(f"Request {request.request_id} got the answer to request {message['request_id']}.")
    if request.weights_version is not None and message["weights_version"] != request.weights_version:
        raise MessageError(
            f"The samples come from weights {message['weights_version']}, and {request.weights_version} was asked for."
        )
    shapes = {"lengths": ("iu", 1), "logprobs": ("f", 1)}
    if request.support:
        shapes |= {"support_sizes": ("iu", 1), "support_ids": ("iu", 1)}
    else:
        shapes |= {"token_ids": ("iu", 1)}
    if request.routes_start is not None:
        shapes |= {"route_rows": ("iu", 1), "routes": ("iu", 3)}
    fields = _fields(message, shapes)
    for name in ("finish_reasons", "repaired"):
        if len(message[name]) != request.n:
            raise MessageError(f"{name} has {len(message[name])} entries for {request.n} samples.")
    if not all(type(count) is int and count >= 0 for count in message["repaired"]):
        raise MessageError(f"repaired={message['repaired']} are not counts.")
    logprobs = fields["logprobs"]
    ends = _ends(fields, "lengths", "logprobs", request.n)
    supports: list[SupportRows | None] = [None] * request.n
    if request.support:
        rows, token_ids = _support(fields, len(logprobs))
        supports = list(rows.split(fields["lengths"]))
    else:
        token_ids = fields["token_ids"].astype(np.int32)
        if len(token_ids) != len(logprobs):
            raise MessageError(f"{len(token_ids)} token_ids came with {len(logprobs)} logprobs.")
    # A probability of 1 may come out above 1 by a rounding.
    if not np.isfinite(logprobs).all() or (logprobs > _ROUNDING).any():
        raise MessageError("logprobs holds values that are not log-probabilities of sampled tokens.")
    route_ends = None
    if request.routes_start is not None:
        if message["routes_start"] != request.routes_start:
            raise MessageError(f"routes_start={message['routes_start']}; {request.routes_start} was asked for.")
        route_ends = _ends(fields, "route_rows", "routes", request.n)
    _check_types(fields)
    samples = []
    for i in range(request.n):
        tokens = slice(ends[i], ends[i + 1])
        if message["finish_reasons"][i] not in ("stop", "length"):
            raise MessageError(f"finish_reasons[{i}]={message['finish_reasons'][i]!r} is not 'stop' or 'length'.")
        routes = None
        if route_ends is not None:
            routes = fields["routes"][route_ends[i] : route_ends[i + 1]]
            most = len(request.prompt_ids) + ends[i + 1] - ends[i] - 1 - message["routes_start"]
            if len(routes) > max(most, 0):
                raise MessageError(f"Sample {i} has {len(routes)} rows of routes; {most} tokens entered the model.")
        samples.append(
            Sample(
                token_ids=token_ids[tokens],
                logprobs=logprobs[tokens],
                support=supports[i],
                routes=routes,
                routes_start=message["routes_start"],
                finish_reason=message["finish_reasons"][i],
                repaired=message["repaired"][i],
                weights_version=message["weights_version"],
            )
        )
    return samples


def encode_version(version: str) -> bytes:
    """The body that names a version of the weights, for `RELOAD` and `LABEL`."""
    return dumps({"version": VERSION, "weights_version": version})


def decode_version(body: bytes) -> str:
    """The version of the weights that `body` names.

    Raises:
        MessageError: for any other body.
    """
    return _message(body, {"version": (int,), "weights_version": (str,)})["weights_version"]


def encode_error(code: str, text: str, **details: Any) -> bytes:
    """The body of an answer that is an error; `code` is what a client acts on."""
    return dumps({"error": {"code": code, "message": text, **details}})


def decode_error(body: bytes) -> dict[str, Any]:
    """`code`, `message` and details of an error body; a body of another form (a proxy's page) has the code `""`."""
    try:
        error = orjson.loads(body)["error"]
        return {"code": str(error["code"]), "message": str(error["message"]), **error}
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return {"code": "", "message": body[:200].decode(errors="replace")}


def _sampled_first(rows: SupportRows, token_ids: np.ndarray) -> np.ndarray:
    """`[nnz]` ids of the `T` rows, in each row the token's first, the others ascending."""
    rows.validate(sampled_ids=token_ids)
    row = np.repeat(np.arange(len(rows), dtype=np.int64), rows.sizes)
    others = rows.token_ids != token_ids[row]
    return (np.sort(row << 33 | others.astype(np.int64) << 32 | rows.token_ids) & 0xFFFFFFFF).astype(np.int32)


def _support(fields: Mapping[str, np.ndarray], num_tokens: int) -> tuple[SupportRows, np.ndarray]:
    """The supports of `T` tokens, and `[T]` int32, the tokens."""
    sizes = fields["support_sizes"]
    if len(sizes) > 1 and (sizes == sizes[0]).all():
        raise MessageError(f"support_sizes are {len(sizes)} times {sizes[0]}; sizes that are all alike travel once.")
    if len(sizes) == 1 < num_tokens:
        sizes = np.repeat(sizes, num_tokens)
    ends = _ends({**fields, "support_sizes": sizes}, "support_sizes", "support_ids", num_tokens)
    if (sizes < 1).any():
        raise MessageError(f"support_sizes[{int(np.argmin(sizes))}]={sizes.min()}; a row holds its sampled token.")
    try:
        rows = SupportRows(fields["support_ids"], ends)
    except SupportError as error:
        raise MessageError(f"support_ids: {error}") from error
    ids, starts = rows.token_ids, ends[:-1]
    sampled = ids[starts]
    rises = ids[1:] > ids[:-1]
    rises[starts[1:] - 1] = True  # from one row to the next
    rises[starts[sizes > 1]] = True  # from the sampled token to the others
    if not rises.all() or ids.min(initial=0) < 0:
        place = int(np.argmin(rises))
        raise MessageError(f"support_ids: ids {ids[place : place + 2]} in one row do not ascend from 0.")
    if np.count_nonzero(ids == np.repeat(sampled, sizes)) != num_tokens:
        raise MessageError("support_ids: a row holds its sampled token twice.")
    return rows, sampled


def _ends(fields: Mapping[str, np.ndarray], sizes: str, values: str, count: int) -> np.ndarray:
    """`[count + 1]` int64 offsets into `values`."""
    given = fields[sizes].astype(np.int64)
    if len(given) != count:
        raise MessageError(f"{sizes} has {len(given)} entries for {count} rows.")
    ends = np.concatenate([[0], np.cumsum(given)])
    if (given < 0).any() or ends[-1] != len(fields[values]):
        raise MessageError(f"{sizes} add up to {ends[-1]}, and {values} has {len(fields[values])} rows.")
    return ends


def _message(body: bytes, keys: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    try:
        message = loads(body)
    except WireError as error:
        raise MessageError(str(error)) from None
    if not isinstance(message, dict):
        raise MessageError(f"The body is a JSON {type(message).__name__}, not an object.")
    if message.get("version") != VERSION:
        raise MessageError(f"version={message.get('version')!r}; this end speaks version {VERSION}.")
    for name, kinds in keys.items():
        if name not in message:
            raise MessageError(f"{name} is missing.")
        # In Python a bool is an int.
        if not isinstance(message[name], kinds) or (isinstance(message[name], bool) and bool not in kinds):
            raise MessageError(f"{name}={message[name]!r} is not {' or '.join(k.__name__ for k in kinds)}.")
    unknown = sorted(message.keys() - keys.keys())
    if unknown:
        raise MessageError(f"{', '.join(unknown)} is not known here. Known: {', '.join(keys)}.")
    if list(message) != list(keys):
        raise MessageError(f"The keys {', '.join(message)} come in another order than {', '.join(keys)}.")
    return message


def _fields(message: Mapping[str, Any], wanted: Mapping[str, tuple[str, int]]) -> dict[str, np.ndarray]:
    try:
        fields = unpack(message["fields"])
    except ValueError as error:
        raise MessageError(f"fields: {error}") from error
    for name, (kinds, ndim) in wanted.items():
        if name not in fields:
            raise MessageError(f"fields has no {name}; it has {', '.join(fields)}.")
        if fields[name].dtype.kind not in kinds or fields[name].ndim != ndim:
            raise MessageError(f"{name} is {fields[name].dtype} of shape {fields[name].shape}.")
    if list(fields) != list(wanted):
        raise MessageError(f"fields holds {', '.join(fields)}; in this order, only {', '.join(wanted)} were asked for.")
    return fields


def _check_types(fields: Mapping[str, np.ndarray]) -> None:
    """Integers come in the smallest type that holds them, and in no other."""
    for name, array in fields.items():
        if array.dtype.kind in "iu" and array.dtype != smallest(array).dtype:
            raise MessageError(f"{name} is {array.dtype}, and its values fit {smallest(array).dtype}.")


def _without(message: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in names}
