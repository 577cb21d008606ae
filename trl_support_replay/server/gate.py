"""Keeps generation and weight reloads apart, so that a sample comes from exactly one version of the weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class WeightsGate:
    """Many generations, or one reload. Generations that come after a waiting reload wait behind it.

    For one event loop: nothing here is shared between threads.

    Attributes:
        version: name of the weights that the engine holds; `None` for those it was started with.
        broken: whether a reload failed half-way, so that the engine may hold no whole version.
    """

    def __init__(self) -> None:
        self.version: str | None = None
        self.broken = False
        self._running = 0
        self._reloads = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = asyncio.Event()
        self._open.set()
        self._one_reload = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        """Hold the weights as they are, together with other generations."""
        while not self._open.is_set():  # closed again, perhaps, before this task ran
            await self._open.wait()
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def reloading(self, timeout: float) -> AsyncIterator[None]:
        """Hold the weights alone.

        Raises:
            TimeoutError: when other generations or reloads are still running after `timeout` seconds.
        """
        self._reloads += 1
        self._open.clear()
        try:
            async with contextlib.AsyncExitStack() as held:
                async with asyncio.timeout(timeout):
                    await held.enter_async_context(self._one_reload)
                    await self._idle.wait()
                yield
        finally:
            self._reloads -= 1
            if self._reloads == 0:
                self._open.set()
