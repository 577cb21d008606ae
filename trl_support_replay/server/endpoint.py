"""The packed endpoint beside vLLM's own server, as ASGI middleware.

    vllm serve MODEL --middleware trl_support_replay.server.endpoint.SupportReplayMiddleware ...

`vllm-serve` adds this and the other flags that it needs. Middleware is the one way into vLLM's server that all its
supported versions have in public; it sees a request first and answers those under `/support_replay/`, so everything
else reaches vLLM as it came.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..traces.record import fingerprint
from ..wire import protocol
from .errors import Refusal
from .generation import RequestRunner
from .reload import Reloader
from .settings import ServerSettings

logger = logging.getLogger(__name__)


class SupportReplayMiddleware:
    """ASGI middleware of vLLM's server; `app` is the rest of the server."""

    def __init__(self, app: ASGIApp):
        self._app = app
        self._settings = ServerSettings.from_environment()
        self._endpoint: Starlette | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or not path.startswith(protocol.PREFIX + "/"):
            await self._app(scope, receive, send)
            return
        if self._endpoint is None:
            self._endpoint = _Endpoint(scope["app"].state, self._settings).application()
        # Of its own: the application writes itself into its scope.
        await self._endpoint(dict(scope), receive, send)


class _Endpoint:
    def __init__(self, state: Any, settings: ServerSettings):
        self._settings = settings
        self._api_keys = _api_keys(state.args)
        self._reloader = Reloader(state.engine_client, settings)
        self._runner = RequestRunner(state.engine_client, settings, self._reloader.gate)
        self._instance = secrets.token_hex(8)
        self._served_model = (state.args.served_model_name or [state.args.model])[0]
        self._model_files = fingerprint(state.args.model, getattr(state.args, "revision", None))  # as it was started

    def application(self) -> Starlette:
        def route(method: str, path: str, handler: Callable[[bytes], Awaitable[bytes]]) -> Route:
            return Route(path, functools.partial(self._answer, handler), methods=[method])

        return Starlette(
            routes=[
                route("GET", protocol.INFO, self._info),
                route("POST", protocol.GENERATE, self._generate),
                route("POST", protocol.RELOAD, self._reload),
                route("POST", protocol.LABEL, self._label),
            ],
            exception_handlers={HTTPException: _no_such_path, Exception: _failed},
        )

    async def _answer(self, handler: Callable[[bytes], Awaitable[bytes]], request: Request) -> Response:
        try:
            self._authorize(request)
            body = await self._read(request)
            return _signed(200, await _unless_disconnected(handler(body), request.receive))
        except Refusal as refusal:
            return _signed(refusal.status, refusal.body)
        except ClientDisconnect:
            return Response(status_code=499)  # to nobody

    def _authorize(self, request: Request) -> None:
        # vLLM's own check covers only its own path prefixes.
        if not self._api_keys:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        matches = [secrets.compare_digest(given.encode(), key.encode()) for key in self._api_keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise Refusal(401, "unauthorized", "The server was started with an API key, and the request has none.")

    async def _read(self, request: Request) -> bytes:
        limit = self._settings.max_request_bytes
        declared = request.headers.get("content-length", "0")
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit or (declared.isdigit() and int(declared) > limit):
                raise Refusal(
                    413, "too_large", f"The request body has more than max_request_bytes={limit} bytes.", limit=limit
                )
        if protocol.DIGEST_HEADER in request.headers:
            try:
                protocol.check_digest(bytes(body), request.headers[protocol.DIGEST_HEADER])
            except protocol.MessageError as error:
                raise Refusal(400, "corrupt_body", str(error)) from error
        return bytes(body)

    async def _info(self, body: bytes) -> bytes:
        return msgspec.json.encode(
            {
                "version": protocol.VERSION,
                "instance": self._instance,
                "model": self._served_model,
                "model_files": self._model_files,
                "weights_version": self._reloader.gate.version,
                "weight_reload": self._settings.weights_dir is not None,
                **self._runner.describe(),
            }
        )

    async def _generate(self, body: bytes) -> bytes:
        request = _parsed(protocol.decode_request, body)
        return protocol.encode_samples(request.request_id, await self._runner.generate(request))

    async def _reload(self, body: bytes) -> bytes:
        version = _parsed(protocol.decode_version, body)
        await self._reloader.reload(version)
        return protocol.encode_version(version)

    async def _label(self, body: bytes) -> bytes:
        version = _parsed(protocol.decode_version, body)
        await self._reloader.label(version)
        return protocol.encode_version(version)


def _no_such_path(request: Request, error: Any) -> Response:
    message = f"There is no {request.method} {request.url.path}."
    return _signed(error.status_code, protocol.encode_error("unknown_path", message))


def _failed(request: Request, error: Exception) -> Response:
    return _signed(500, protocol.encode_error("internal", f"{type(error).__name__}: {error}"))


def _signed(status: int, body: bytes) -> Response:
    kind = protocol.CONTENT_TYPE if status == 200 else "application/json"
    return Response(body, status, {protocol.DIGEST_HEADER: protocol.digest(body)}, kind)


def _parsed(decode: Callable[[bytes], Any], body: bytes) -> Any:
    try:
        return decode(body)
    except protocol.MessageError as error:
        raise Refusal(400, "bad_message", str(error)) from error


def _api_keys(args: Any) -> list[str]:
    """The keys that vLLM itself accepts: those of `--api-key`, else the one in its environment."""
    return [key for key in (args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]


async def _unless_disconnected(answer: Awaitable[bytes], receive: Receive) -> bytes:
    """The answer, or `ClientDisconnect` as soon as the client hangs up: its request is then aborted in the engine."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ClientDisconnect
    finally:
        for task in (work, gone):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await work


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
