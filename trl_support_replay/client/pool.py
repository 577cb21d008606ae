"""All servers of a run, used from ordinary (not asynchronous) code."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from ..settings.contract import UnreplayableSettingError
from ..wire.protocol import GenerateRequest, Sample
from .prefixes import PrefixIndex
from .servers import Server, connect_vllm
from .transport import Retry, Transport

T = TypeVar("T")

# Prompts whose server is remembered; more than any generation batch has.
_REMEMBERED = 65536


class GenerationError(RuntimeError):
    """A batch of requests could not be completed. `__cause__` says why.

    Attributes:
        completed: number of requests that were.
        total: number of requests.
    """

    def __init__(self, cause: BaseException, completed: int, total: int):
        super().__init__(f"{cause}\n{completed} of {total} requests of this batch were completed; none is used.")
        self.completed = completed
        self.total = total


class ServerPool:
    """Servers that hold the same weights.

    Requests of a batch go out together. A prompt that continues an earlier one goes to the server that had it, whose
    prefix cache holds it; a new prompt goes to the server with the least to do.

    Args:
        urls: base URLs.
        api_key, request_timeout: see `Transport`.
        retry: how long to try again; also how long a server may take to come up.
        connect: makes a server of its connections; default: vLLM's.
        temperature: the trainer's, which every request that records supports must have; `None` lets each have its own.

    Attributes:
        servers: one for each URL, in order.
        first_server: index, modulo their number, of the server that is asked first when several have equally little to
            do. Processes of one run know nothing of each other's requests: each should begin at another server.

    Raises:
        ServerUnreachableError, ServerRefusalError: when one of them cannot be used.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api_key: str | None = None,
        retry: Retry = Retry(),  # noqa: B008 - frozen
        request_timeout: float = 1800.0,
        connect: Callable[[Transport], Awaitable[Server]] = connect_vllm,
        temperature: float | None = None,
    ):
        if not urls:
            raise ValueError("No server URL was given.")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="support-replay-client", daemon=True)
        self._thread.start()
        self._affinity = _Affinity(len(urls))
        self._temperature = temperature
        self.first_server = 0
        self._transports = [
            Transport(url, api_key=api_key, retry=retry, request_timeout=request_timeout) for url in urls
        ]
        try:
            self.servers: list[Server] = self._run(self._connect(connect))
        except BaseException:
            self.close()
            raise

    async def _connect(self, connect: Callable[[Transport], Awaitable[Server]]) -> list[Server]:
        return list(await asyncio.gather(*map(connect, self._transports)))

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Sample]]:
        """The samples of each request, in the order of the requests.

        Raises:
            UnreplayableSettingError: for a request with another temperature than the trainer's.
            GenerationError: when one of them fails for good; the others are then cancelled.
        """
        for request in requests:
            temperature = request.sampling.get("temperature", 1.0)
            if request.support and self._temperature not in (None, temperature):
                raise UnreplayableSettingError(
                    "temperature",
                    temperature,
                    f"the trainer scores at temperature={self._temperature}",
                    "Give every request the trainer's temperature; its top_k may be its own",
                )
        return self._run(self._generate(requests))

    async def _generate(self, requests: Sequence[GenerateRequest]) -> list[list[Sample]]:
        tasks = [asyncio.ensure_future(self._generate_one(request)) for request in requests]
        if not tasks:
            return []
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failures = [task.exception() for task in tasks if task.done() and task.exception()]
            if failures:
                completed = sum(task.done() and not task.exception() for task in tasks)
                raise GenerationError(failures[0], completed, len(tasks)) from failures[0]  # type: ignore[arg-type]
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    async def _generate_one(self, request: GenerateRequest) -> list[Sample]:
        index = self._affinity.acquire(request.prompt_ids, request.n, self.first_server)
        try:
            return await self.servers[index].generate(request)
        finally:
            self._affinity.release(index, request.n)

    def set_weights(self, version: str, reload: bool) -> None:
        """Let every server load a version from the shared folder, or (`reload=False`) name the weights it has.

        Raises:
            ServerUnreachableError, ServerRefusalError: when one of them cannot.
        """

        async def set_all() -> None:
            await asyncio.gather(*(server.set_weights(version, reload) for server in self.servers))

        self._run(set_all())
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """New weights have emptied the servers' prefix caches, so prompts may go anywhere again."""
        self._affinity.clear()

    def close(self) -> None:
        """Close the connections and end the client's thread."""

        async def close_all() -> None:
            await asyncio.gather(*(transport.close() for transport in self._transports))

        self._run(close_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def new_request_id() -> str:
    """A name that no other request has."""
    return uuid.uuid4().hex


class _Affinity:
    """Which server a prompt goes to."""

    def __init__(self, num_servers: int):
        self._load = [0] * num_servers
        self._server_of: PrefixIndex[int] = PrefixIndex(_REMEMBERED)

    def acquire(self, prompt_ids: np.ndarray, samples: int, first: int) -> int:
        if len(self._load) == 1:
            return 0
        index = self._server_of.longest(prompt_ids)
        if index is None:
            count = len(self._load)
            index = min(((first + i) % count for i in range(count)), key=self._load.__getitem__)
        self._load[index] += samples
        self._server_of.put(prompt_ids, index)
        return index

    def release(self, index: int, samples: int) -> None:
        if len(self._load) > 1:
            self._load[index] -= samples

    def clear(self) -> None:
        self._server_of.clear()
