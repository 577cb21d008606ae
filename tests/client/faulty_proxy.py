"""A reverse proxy that damages chosen exchanges between a client and a server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """What happens to one exchange.

    Attributes:
        kind: "drop_request" and "drop_response" close the connection before the request reaches the server or after it
            has answered; "truncate" sends the first `position` part of the answer; "flip" and "flip_request" invert one
            bit there; "status" answers in the server's place; "delay" waits `seconds`; "stall" sends the head and
            half of the body, then nothing for `seconds`.
        position: between 0 and 1.
        status: for "status".
        seconds: for "delay" and "stall".
    """

    kind: str
    position: float = 0.5
    status: int = 503
    seconds: float = 0.0


class FaultyProxy:
    """Forwards to `target`, applying the next of `faults` to each exchange and none when they are used up.

    Args:
        target: port of the server on this machine.
        faults: applied in the order in which requests arrive.
        only: predicate on the request line; other requests pass untouched and use up no fault.

    Attributes:
        url: where it listens.
        connections: number of connections that clients made.
        exchanges: number of requests that came in, faulty ones included.
    """

    def __init__(self, target: int, faults: Iterator[Fault] | list[Fault] = (), only: Callable[[str], bool] = None):
        self._target = target
        self.faults = iter(faults)
        self._only = only or (lambda line: line.startswith("POST"))
        self.connections = self.exchanges = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._client, "127.0.0.1", 0), self._loop
        ).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop(self):
        async def shut():
            self._server.close()
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(shut(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _client(self, reader, writer):
        self.connections += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _exchange(self, reader, writer) -> bool:
        request = await _message(reader)
        self.exchanges += 1
        line = request.split(b"\r\n", 1)[0].decode()
        fault = next(self.faults, None) if self._only(line) else None
        kind = fault.kind if fault else "none"
        if kind == "drop_request":
            return False
        if kind == "status":
            writer.write(b"HTTP/1.1 %d Faulty\r\nContent-Length: 4\r\n\r\noops" % fault.status)
            await writer.drain()
            return True
        if kind == "delay":
            await asyncio.sleep(fault.seconds)
        if kind == "flip_request":
            request = _flipped(request, fault.position, after=request.index(b"\r\n\r\n") + 4)
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            server_writer.write(request)
            await server_writer.drain()
            answer = await _unless_closed(_message(server_reader), reader)
        finally:
            server_writer.close()
        if kind == "drop_response":
            return False
        if kind == "truncate":
            writer.write(answer[: int(fault.position * len(answer))])
            await writer.drain()
            return False
        if kind == "flip":
            answer = _flipped(answer, fault.position)
        if kind == "stall":
            writer.write(answer[: len(answer) * 3 // 4])
            await writer.drain()
            await asyncio.sleep(fault.seconds)
            return False
        writer.write(answer)
        await writer.drain()
        # After a damaged head, client and proxy may differ in where the next message begins.
        return kind != "flip"


async def _unless_closed(answer, client_reader) -> bytes:
    """The answer, or `ConnectionError` as soon as the client hangs up, so that the server hears of it."""
    tasks = [asyncio.ensure_future(answer), asyncio.ensure_future(client_reader.read(1))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ConnectionResetError("the client is gone")
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _message(reader) -> bytes:
    """One HTTP message with a Content-Length, or without a body."""
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return head + await reader.readexactly(int(line.split(b":")[1]))
    return head


def _flipped(data: bytes, position: float, after: int = 0) -> bytes:
    bits = (len(data) - after) * 8
    bit = min(int(position * bits), bits - 1)
    changed = bytearray(data)
    changed[after + bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)
