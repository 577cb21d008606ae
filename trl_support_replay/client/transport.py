"""HTTP exchanges that survive a bad network: kept connections, bounded bodies, retries with back-off."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from ..settings.urls import credentials, without_credentials
from ..wire import protocol

logger = logging.getLogger(__name__)

T = TypeVar("T")

# An answer with one of these may be another one next time.
_TRANSIENT_STATUS = frozenset({408, 425, 429})
# These mean the same whoever answers.
_FINAL_FROM_ANYONE = frozenset({401, 403, 413})


class ServerRefusalError(RuntimeError):
    """The server understood a request and refuses it; asking again would not help.

    Attributes:
        status: HTTP status.
        code: what kind of refusal, for programs; empty when the answer did not come from the endpoint.
        setting: name of the setting at fault, or `None`.
    """

    def __init__(self, url: str, status: int, error: dict[str, Any]):
        super().__init__(f"{url} answered {status}: {error['message']}")
        self.status = status
        self.code: str = error["code"]
        self.setting: str | None = error.get("setting")


class ServerUnreachableError(RuntimeError):
    """A request kept failing until its retries were used up. `__cause__` is the last failure."""


class _TransientError(Exception):
    pass


@dataclass(frozen=True)
class Retry:
    """How long to try again.

    Attributes:
        give_up_after: seconds from the first failure of a request to the last attempt.
        first_delay: seconds before the first retry; each further delay is twice as long.
        max_delay: seconds, the longest delay.
    """

    give_up_after: float = 240.0
    first_delay: float = 0.25
    max_delay: float = 10.0

    def delay(self, failures: int) -> float:
        """Seconds to wait after this many failures: exponential, with up to half of it taken off at random."""
        return min(self.max_delay, self.first_delay * 2 ** (failures - 1)) * random.uniform(0.5, 1.0)


class Transport:
    """Connections to one server, for use on one event loop.

    Connection errors, time-outs, 5xx answers and bodies that are not what the server wrote count as transient: the
    request is sent again. Everything that is sent here may be repeated without harm.

    Args:
        url: base URL, for example `http://host:8000` or `https://gateway/team-a`. Credentials in it
            (`https://user:password@gateway`) are sent as basic authentication, in place of the key.
        api_key: sent as a bearer token, when given.
        retry: how long to try again.
        request_timeout: seconds without a byte after which an answer counts as lost. Generation sends nothing before
            it is done, so this bounds the generation of one prompt's samples.
        max_response_bytes: bound on an answer.
        max_connections: requests in flight at once.

    Attributes:
        url: base URL without credentials.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        retry: Retry = Retry(),  # noqa: B008 - frozen
        request_timeout: float = 1800.0,
        max_response_bytes: int = 2**30,
        max_connections: int = 64,
    ):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"Server URL {without_credentials(url)!r} does not look like http://host:port.")
        self.url = without_credentials(url).rstrip("/")
        self.retry = retry
        self._max_response_bytes = max_response_bytes
        headers = {"Accept-Encoding": "identity"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._slots = asyncio.Semaphore(max_connections)
        self._client = httpx.AsyncClient(
            headers=headers,
            auth=credentials(url),
            timeout=httpx.Timeout(request_timeout, connect=10.0),
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
            trust_env=False,  # a proxy variable meant for the internet must not catch traffic inside a cluster
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def call(
        self, method: str, path: str, body: bytes | None, parse: Callable[[bytes], T], *, signed: bool = True
    ) -> T:
        """Send a request until it is answered, and return what `parse` makes of the answer.

        Args:
            method, path, body: the request.
            parse: reads the body of a 200; raises `protocol.MessageError` for one that is not whole.
            signed: whether answers must carry `protocol.DIGEST_HEADER`, as those of the endpoint do.

        Raises:
            ServerRefusalError: for a 4xx answer.
            ServerUnreachableError: when the retries are used up.
        """
        failures, first_failure = 0, 0.0
        while True:
            try:
                async with self._slots:
                    return await self._attempt(method, path, body, parse, signed)
            except (httpx.TransportError, _TransientError, protocol.MessageError) as error:
                cause = error
            now = time.monotonic()
            failures, first_failure = failures + 1, first_failure or now
            left = self.retry.give_up_after - (now - first_failure)
            if left <= 0:
                raise ServerUnreachableError(
                    f"{method} {self.url}{path} failed {failures} times over {now - first_failure:.0f} seconds. Last "
                    f"cause: {_describe(cause)}."
                ) from cause
            delay = min(self.retry.delay(failures), left)
            logger.warning(
                "%s %s%s failed (%s). Attempt %d follows in %.1f seconds.",
                method,
                self.url,
                path,
                _describe(cause),
                failures + 1,
                delay,
            )
            await asyncio.sleep(delay)

    async def _attempt(
        self, method: str, path: str, body: bytes | None, parse: Callable[[bytes], T], signed: bool
    ) -> T:
        headers = {}
        if body is not None:
            kind = protocol.CONTENT_TYPE if signed else "application/json"
            headers = {"Content-Type": kind, protocol.DIGEST_HEADER: protocol.digest(body)}
        async with self._client.stream(method, self.url + path, content=body, headers=headers) as response:
            content = await self._read(response)
            status, digest = response.status_code, response.headers.get(protocol.DIGEST_HEADER)
        if status == 200:
            if signed or digest is not None:
                protocol.check_digest(content, digest)
            return parse(content)
        error = protocol.decode_error(content)
        # What a proxy or a server that is still starting answers in the endpoint's place may pass.
        from_endpoint = bool(error["code"]) and digest == protocol.digest(content)
        final = 400 <= status < 500 and status not in _TRANSIENT_STATUS and error["code"] != "corrupt_body"
        if final and (from_endpoint or not signed or status in _FINAL_FROM_ANYONE):
            raise ServerRefusalError(self.url + path, status, error)
        raise _TransientError(f"answer {status}: {error['message']}")

    async def _read(self, response: httpx.Response) -> bytes:
        chunks, size = [], 0
        async for chunk in response.aiter_raw():
            chunks.append(chunk)
            size += len(chunk)
            if size > self._max_response_bytes:
                raise _TransientError(f"the answer has more than max_response_bytes={self._max_response_bytes} bytes")
        coding = response.headers.get("content-encoding", "identity")
        if coding != "identity":
            raise _TransientError(f"the answer's content-encoding {coding!r} was not asked for")
        return b"".join(chunks)


def _describe(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, _TransientError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
