"""An answer written to its connection as bytes, past ASGI: the way of streams, and of all else.

Every ASGI message costs a validation and a write, and every write a system call. Here the head
goes out with the first bytes behind it, and the last bytes with the end.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Protocol

from starlette.types import Send

from gateway.api.client import ClientProtocol

RawHeaders = list[tuple[bytes, bytes]]

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
_SIZES = tuple(b"%x\r\n" % size for size in range(2048))
"""The lines before chunks of usual sizes, made once: this is the hottest path that there is."""

_CHUNKS = (b"transfer-encoding", b"chunked")
_CLOSE = (b"connection", b"close")
_NO_BODY = (204, 304)


class Sender(Protocol):
    """Writes one answer: ``start`` once, ``piece`` any number of times, ``last`` once. ``flush``
    lets a head go that may wait for the bytes behind it."""

    async def start(self, status: int, headers: RawHeaders) -> None: ...

    async def flush(self) -> None: ...

    async def piece(self, data: bytes) -> None: ...

    async def last(self, data: bytes) -> None: ...

    def abandon(self) -> None:
        """The answer stays incomplete, and the client must see that it is."""


class AsgiSender:
    """On any server; an application that returns too early makes it end the connection."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def start(self, status: int, headers: RawHeaders) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def flush(self) -> None:
        """The server has the head already."""

    async def piece(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def last(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    def abandon(self) -> None:
        pass


class DirectSender:
    """On our own connection. HTTP/1.0 knows no chunks: what has no length ends with it there."""

    def __init__(self, client: ClientProtocol, old: bool) -> None:
        self.transport: asyncio.Transport = client.transport
        self.chunked = False
        self.client = client
        self._cycle = client.running
        self._old = old
        self._head = b""

    async def start(self, status: int, headers: RawHeaders) -> None:
        """The head waits here for the bytes behind it."""
        cycle = self._cycle
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        known = status in _NO_BODY or any(name == b"content-length" for name, _ in headers)
        self.chunked = not known and not self._old
        if self.chunked:
            headers = [*headers, _CHUNKS]
        if _CLOSE in headers:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            headers = [*headers, _CLOSE]
        lines = [b"HTTP/1.1 %d %b\r\n" % (status, _REASONS.get(status, b""))]
        lines += [b"%b: %b\r\n" % header for header in headers]
        lines.append(b"\r\n")
        self._head = b"".join(lines)

    async def flush(self) -> None:
        if self._head:
            await self._drained()
            self._write(b"")

    async def piece(self, data: bytes) -> None:
        await self._drained()
        self._write(self._framed(data))

    async def last(self, data: bytes) -> None:
        await self._drained()
        framed = self._framed(data)
        self._write(framed + b"0\r\n\r\n" if self.chunked else framed)
        cycle = self._cycle
        if not cycle.disconnected:
            cycle.response_complete = True
            cycle.message_event.set()
            if not cycle.keep_alive:
                self.transport.close()
            cycle.on_response()

    def abandon(self) -> None:
        self._write(b"")
        self._cycle.disconnected = True
        self.transport.close()

    def write_chunk(self, data: bytes) -> None:
        """One chunk behind the first piece, at once; the caller minds the client's pace."""
        transport = self.transport
        if not transport.is_closing():
            size = len(data)
            line = _SIZES[size] if size < len(_SIZES) else b"%x\r\n" % size
            transport.write(b"".join((line, data, b"\r\n")))

    def write(self, data: bytes) -> None:
        """Bytes of a body without chunks, at once."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self.chunked and data else data

    def _write(self, data: bytes) -> None:
        head, self._head = self._head, b""
        if head or data:
            self.write(head + data)

    async def _drained(self) -> None:
        flow = self.client.flow
        if flow.write_paused and not self._cycle.disconnected:
            await flow.drain()
