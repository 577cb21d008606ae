"""What client and server say to each other: paths, requests, samples and errors, and their bytes.

A message is one MessagePack map. Everything with an entry per token is a binary array (`arrays`). Fields that a reader
does not know are skipped, so a later minor version may add some; another major version is refused. A support travels as
its sampled token, so that a row without its token cannot be said, and the other ids in ascending order, packed where
rows are long (`packed_ids`). A header carries the SHA-256 of the message, so one that was cut short or altered on the
way is recognised.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np

from ..settings.sampling_table.vllm import REQUEST
from ..traces.support import SupportRows
from .arrays import Array, MessageError, ends_of, read, smallest
from .supports import Ids, pack_supports, unpack_supports

VERSION = (2, 0)
"""Major and minor version of the messages."""
PREFIX = "/support_replay/v2"
GENERATE = PREFIX + "/generate"
INFO = PREFIX + "/info"
RELOAD = PREFIX + "/reload_weights"
LABEL = PREFIX + "/label_weights"
DIGEST_HEADER = "x-support-replay-digest"
CONTENT_TYPE = "application/msgpack"
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


Count = Annotated[int, msgspec.Meta(ge=0)]
M = TypeVar("M", bound=msgspec.Struct)


class _Request(msgspec.Struct):
    version: tuple[int, int]
    request_id: str
    prompt_ids: Array
    n: int
    sampling: dict[str, Any]
    support: bool
    routes_start: int | None
    weights_version: str | None


class _Samples(msgspec.Struct):
    version: tuple[int, int]
    request_id: str
    weights_version: str | None
    finish_reasons: list[Literal["stop", "length"]]
    repaired: list[Count]
    routes_start: int
    lengths: Array
    token_ids: Array
    logprobs: Array
    support_sizes: Array | None = None
    support_ids: Ids | None = None
    route_rows: Array | None = None
    routes: Array | None = None


class _Weights(msgspec.Struct):
    version: tuple[int, int]
    weights_version: str


class _Version(msgspec.Struct):
    version: tuple[int, int]


def encode_request(request: GenerateRequest) -> bytes:
    """The body that asks for `request`."""
    return msgspec.msgpack.encode(
        _Request(
            version=VERSION,
            request_id=request.request_id,
            prompt_ids=Array.of(smallest(request.prompt_ids)),
            n=request.n,
            sampling=dict(request.sampling),
            support=request.support,
            routes_start=request.routes_start,
            weights_version=request.weights_version,
        )
    )


def decode_request(body: bytes) -> GenerateRequest:
    """The request in `body`.

    Raises:
        MessageError: naming the field that is missing or of the wrong type.
    """
    message = _message(body, _Request)
    prompt_ids = read(message.prompt_ids, "prompt_ids")
    if len(prompt_ids) == 0:
        raise MessageError("prompt_ids is empty: there is nothing to continue.")
    names = ("request_id", "n", "sampling", "support", "routes_start", "weights_version")
    return GenerateRequest(prompt_ids=prompt_ids.astype(np.int32), **{name: getattr(message, name) for name in names})


def encode_samples(request_id: str, samples: Sequence[Sample]) -> bytes:
    """The body that answers a request with its samples, packed one after the other."""
    token_ids = np.concatenate([s.token_ids for s in samples])
    message = _Samples(
        version=VERSION,
        request_id=request_id,
        weights_version=samples[0].weights_version,
        finish_reasons=[s.finish_reason for s in samples],  # type: ignore[misc]
        repaired=[s.repaired for s in samples],
        routes_start=samples[0].routes_start,
        lengths=Array.of(smallest([len(s.token_ids) for s in samples])),
        token_ids=Array.of(smallest(token_ids)),
        logprobs=Array.of(np.concatenate([s.logprobs for s in samples]).astype(np.float32)),
    )
    if samples[0].support is not None:
        rows = SupportRows.concatenate([s.support for s in samples if s.support is not None])
        message.support_sizes, message.support_ids = pack_supports(rows, token_ids)
    if samples[0].routes is not None:
        parts = [s.routes for s in samples if s.routes is not None]
        message.route_rows = Array.of(smallest([len(part) for part in parts]))
        message.routes = Array.of(smallest(np.concatenate(parts)))
    return msgspec.msgpack.encode(message)


def decode_samples(body: bytes, request: GenerateRequest) -> list[Sample]:
    """The `request.n` samples in `body`, which must be the answer to `request` and hold everything it asked for.

    Raises:
        MessageError: for any other body.
    """
    message = _message(body, _Samples)
    if message.request_id != request.request_id:
        raise MessageError(f"Request {request.request_id} got the answer to request {message.request_id}.")
    if request.weights_version is not None and message.weights_version != request.weights_version:
        raise MessageError(
            f"The samples come from weights {message.weights_version}, and {request.weights_version} was asked for."
        )
    for name in ("finish_reasons", "repaired"):
        if len(getattr(message, name)) != request.n:
            raise MessageError(f"{name} has {len(getattr(message, name))} entries for {request.n} samples.")
    token_ids = read(message.token_ids, "token_ids").astype(np.int32)
    logprobs = read(message.logprobs, "logprobs", "f")
    if len(token_ids) != len(logprobs):
        raise MessageError(f"{len(token_ids)} token_ids came with {len(logprobs)} logprobs.")
    if token_ids.min(initial=0) < 0:
        raise MessageError(f"token_ids holds {token_ids.min()}, which is no id.")
    # A probability of 1 may come out above 1 by a rounding.
    if not np.isfinite(logprobs).all() or (logprobs > _ROUNDING).any():
        raise MessageError("logprobs holds values that are not log-probabilities of sampled tokens.")
    lengths = read(message.lengths, "lengths")
    ends = ends_of(lengths, request.n, len(logprobs), "lengths", "logprobs")
    supports: list[SupportRows | None] = [None] * request.n
    if request.support:
        rows = unpack_supports(message.support_sizes, message.support_ids, token_ids)
        supports = list(rows.split(lengths))
    routes, route_ends = None, None
    if request.routes_start is not None:
        if message.routes_start != request.routes_start:
            raise MessageError(f"routes_start={message.routes_start}; {request.routes_start} was asked for.")
        routes = read(message.routes, "routes", ndim=3)
        route_rows = read(message.route_rows, "route_rows")
        route_ends = ends_of(route_rows, request.n, len(routes), "route_rows", "routes")
    samples = []
    for i in range(request.n):
        of_sample = None
        if routes is not None and route_ends is not None:
            of_sample = routes[route_ends[i] : route_ends[i + 1]]
            most = len(request.prompt_ids) + ends[i + 1] - ends[i] - 1 - message.routes_start
            if len(of_sample) > max(most, 0):
                raise MessageError(f"Sample {i} has {len(of_sample)} rows of routes; {most} tokens entered the model.")
        samples.append(
            Sample(
                token_ids=token_ids[ends[i] : ends[i + 1]],
                logprobs=logprobs[ends[i] : ends[i + 1]],
                support=supports[i],
                routes=of_sample,
                routes_start=message.routes_start,
                finish_reason=message.finish_reasons[i],
                repaired=message.repaired[i],
                weights_version=message.weights_version,
            )
        )
    return samples


def encode_version(version: str) -> bytes:
    """The body that names a version of the weights, for `RELOAD` and `LABEL`."""
    return msgspec.msgpack.encode(_Weights(VERSION, version))


def decode_version(body: bytes) -> str:
    """The version of the weights that `body` names.

    Raises:
        MessageError: for any other body.
    """
    return _message(body, _Weights).weights_version


def encode_error(code: str, text: str, **details: Any) -> bytes:
    """The JSON body of an answer that is an error; `code` is what a client acts on."""
    return msgspec.json.encode({"error": {"code": code, "message": text, **details}})


def decode_error(body: bytes) -> dict[str, Any]:
    """`code`, `message` and details of an error body; a body of another form (a proxy's page) has the code `""`."""
    try:
        error = msgspec.json.decode(body)["error"]
        return {"code": str(error["code"]), "message": str(error["message"]), **error}
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return {"code": "", "message": body[:200].decode(errors="replace")}


def check_version(version: Sequence[int]) -> None:
    """Raise `MessageError` for a major version that this end does not speak."""
    if version[:1] != VERSION[:1]:
        raise MessageError(
            f"version={'.'.join(map(str, version))}; this end speaks {'.'.join(map(str, VERSION))}. Install the same "
            "release of trl-support-replay on both sides."
        )


def _message(body: bytes, kind: type[M]) -> M:
    try:
        check_version(msgspec.msgpack.decode(body, type=_Version).version)
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MessageError(f"The body of {len(body)} bytes is not a message: {error}.") from None
