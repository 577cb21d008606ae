"""The packed endpoint beside vLLM's own server, as ASGI middleware.

    vllm serve MODEL --middleware trl_support_replay.server.endpoint.SupportReplayMiddleware ...

`vllm-serve` adds this and the other flags that it needs. Middleware is the one way into vLLM's server that all its
supported versions have in public; it sees a request first and answers those under `/support_replay/`, so everything
else reaches vLLM as it came.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from ..traces.record import fingerprint
from ..wire import protocol
from .errors import Refusal
from .generation import Generator
from .reload import Reloader
from .settings import ServerSettings

logger = logging.getLogger(__name__)

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_GZIP_FROM = 1024  # bytes


class _Disconnected(Exception):
    """The client is gone, so nobody waits for an answer."""


class SupportReplayMiddleware:
    """ASGI middleware of vLLM's server; `app` is the rest of the server."""

    def __init__(self, app: Any):
        self._app = app
        self._settings = ServerSettings.from_environment()
        self._endpoint: _Endpoint | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or not path.startswith(protocol.PREFIX + "/"):
            await self._app(scope, receive, send)
            return
        if self._endpoint is None:
            self._endpoint = _Endpoint(scope["app"].state, self._settings)
        await self._endpoint.answer(path, scope, receive, send)


class _Endpoint:
    def __init__(self, state: Any, settings: ServerSettings):
        self._settings = settings
        self._api_keys = _api_keys(state.args)
        self._reloader = Reloader(state.engine_client, settings)
        self._generator = Generator(state.engine_client, settings, self._reloader.gate)
        self._instance = secrets.token_hex(8)
        self._served_model = (state.args.served_model_name or [state.args.model])[0]
        self._model_files = fingerprint(state.args.model, getattr(state.args, "revision", None))  # as it was started

    async def answer(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        routes: dict[tuple[str, str], Callable[[bytes], Awaitable[bytes]]] = {
            ("GET", protocol.INFO): self._info,
            ("POST", protocol.GENERATE): self._generate,
            ("POST", protocol.RELOAD): self._reload,
            ("POST", protocol.LABEL): self._label,
        }
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            self._authorize(headers)
            handler = routes.get((scope["method"], path))
            if handler is None:
                raise Refusal(404, "unknown_path", f"There is no {scope['method']} {path}.")
            request = await self._read(receive, headers)
            status, body = 200, await _unless_disconnected(handler(request), receive)
        except Refusal as error:
            status, body = error.status, error.body
        except _Disconnected:
            return
        except Exception as error:
            logger.exception("%s %s failed.", scope["method"], path)
            status, body = 500, protocol.encode_error("internal", f"{type(error).__name__}: {error}")
        await _send(send, status, body, gzipped="gzip" in headers.get("accept-encoding", ""))

    def _authorize(self, headers: Mapping[str, str]) -> None:
        # vLLM's own check covers only its own path prefixes.
        if not self._api_keys:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        matches = [secrets.compare_digest(given.encode(), key.encode()) for key in self._api_keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise Refusal(401, "unauthorized", "The server was started with an API key, and the request has none.")

    async def _read(self, receive: Receive, headers: Mapping[str, str]) -> bytes:
        limit = self._settings.max_request_bytes
        declared = headers.get("content-length", "0")
        size, chunks = 0, []
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Disconnected
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > limit or (declared.isdigit() and int(declared) > limit):
                raise Refusal(
                    413, "too_large", f"The request body has more than max_request_bytes={limit} bytes.", limit=limit
                )
            more = message.get("more_body", False)
        body = b"".join(chunks)
        if protocol.DIGEST_HEADER in headers:
            try:
                protocol.check_digest(body, headers[protocol.DIGEST_HEADER])
            except protocol.MessageError as error:
                raise Refusal(400, "corrupt_body", str(error)) from error
        return body

    async def _info(self, body: bytes) -> bytes:
        return orjson.dumps(
            {
                "version": protocol.VERSION,
                "instance": self._instance,
                "model": self._served_model,
                "model_files": self._model_files,
                "weights_version": self._reloader.gate.version,
                "weight_reload": self._settings.weights_dir is not None,
                **self._generator.describe(),
            }
        )

    async def _generate(self, body: bytes) -> bytes:
        request = _parsed(protocol.decode_request, body)
        return protocol.encode_samples(request.request_id, await self._generator.generate(request))

    async def _reload(self, body: bytes) -> bytes:
        version = _parsed(protocol.decode_version, body)
        await self._reloader.reload(version)
        return protocol.encode_version(version)

    async def _label(self, body: bytes) -> bytes:
        version = _parsed(protocol.decode_version, body)
        await self._reloader.label(version)
        return protocol.encode_version(version)


def _parsed(decode: Callable[[bytes], Any], body: bytes) -> Any:
    try:
        return decode(body)
    except protocol.MessageError as error:
        raise Refusal(400, "bad_message", str(error)) from error


def _api_keys(args: Any) -> list[str]:
    """The keys that vLLM itself accepts: those of `--api-key`, else the one in its environment."""
    return [key for key in (args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]


async def _unless_disconnected(answer: Awaitable[bytes], receive: Receive) -> bytes:
    """The answer, or `_Disconnected` as soon as the client hangs up: its request is then aborted in the engine."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise _Disconnected
    finally:
        for task in (work, gone):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await work


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, status: int, body: bytes, gzipped: bool) -> None:
    digest = protocol.digest(body).encode()
    headers = [(b"content-type", b"application/json"), (protocol.DIGEST_HEADER.encode(), digest)]
    if gzipped and len(body) > _GZIP_FROM:
        # The fastest level already undoes what base64 added.
        body = gzip.compress(body, compresslevel=1)
        headers.append((b"content-encoding", b"gzip"))
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
