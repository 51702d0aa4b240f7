"""A server on loopback that writes exactly the bytes that a test scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gateway.upstream.pool import Limits

T = TypeVar("T")


def limits(connect_seconds: float = 5, head_seconds: float = 5, idle_seconds: float = 5) -> Limits:
    return Limits(connect_seconds, head_seconds, idle_seconds)


def run(main: Coroutine[Any, Any, T], seconds: float = 10) -> T:
    """`main` in an event loop of its own, within a bound."""
    return asyncio.run(asyncio.wait_for(main, seconds))


async def eventually(what: str, condition: Callable[[], object], seconds: float = 5) -> None:
    """Let the loop run until `condition()` is true; AssertionError naming `what` if it never is."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not condition():
        assert loop.time() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.001)


@dataclass
class Peer:
    """One accepted connection, `number` counted from 0."""

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def request(self) -> bytes:
        """The next request, head and body; raises IncompleteReadError where the client left."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                return head + await self.reader.readexactly(int(line.split(b":")[1]))
        return head

    async def say(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()

    async def gone(self) -> None:
        """Until the client has closed the connection, whatever it sends before."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass

    def reset(self) -> None:
        self.writer.transport.abort()


Script = Callable[[Peer], Awaitable[None]]


@dataclass
class Served:
    url: str
    peers: list[Peer] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[Served]:
    """`script` is run for each connection, which is closed at its end. Its errors are the test's,
    but for a client that has left."""
    tasks: set[asyncio.Task[None]] = set()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(len(served.peers), reader, writer)
        served.peers.append(peer)
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await script(peer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except Exception as error:
            served.errors.append(error)
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            writer.close()

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    served = Served(f"http://{host}:{port}")
    try:
        yield served
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
    if served.errors:
        raise served.errors[0]
