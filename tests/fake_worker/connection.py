"""HTTP/1.1 of the fake worker: requests read from one asyncio transport, answers written to it."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
import zlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal

from tests.fake_worker.script import Script

Headers = list[tuple[bytes, bytes]]
Framing = Literal["chunked", "length", "eof", "none"]
ANSWER_KEPT_BYTES = 1 << 20


INFERENCE = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


@dataclass(eq=False)
class Received:
    """One request as its bytes came in. Times are `time.monotonic()` seconds."""

    method: str
    target: str
    headers: Headers  # names in the case they came in
    body: bytes
    peer_port: int
    connection: int
    received_at: float
    answered_at: float | None = None  # the last byte was written
    peer_closed_at: float | None = None  # the peer left before that
    answer: bytearray = field(default_factory=bytearray)  # body bytes, the first ANSWER_KEPT_BYTES
    answer_bytes: int = 0

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def is_inference(self) -> bool:
        return self.path in INFERENCE

    def values(self, name: str) -> list[str]:
        wanted = name.lower().encode()
        return [v.decode("latin-1") for n, v in self.headers if n.lower() == wanted]

    def header(self, name: str) -> str | None:
        values = self.values(name)
        return values[0] if values else None


class Connection(asyncio.Protocol):
    """Reads requests one after the other; `serve` answers each. Sees the peer leave at once."""

    def __init__(
        self,
        number: int,
        serve: Callable[[Connection, Received], Coroutine[Any, Any, None]],
        changed: Callable[[Connection], None],
    ) -> None:
        self.number = number
        self.open = True
        self.carried_inference = False
        self.peer_port = 0
        self.transport: asyncio.Transport | None = None  # while TLS is still being agreed on
        self._serve = serve
        self._changed = changed
        self._buffer = bytearray()
        self._continued = False
        self._closing = False
        self._current: Received | None = None
        self._task: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def busy(self) -> bool:
        """A request of this connection is not answered yet."""
        return self.open and self._current is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.peer_port = transport.get_extra_info("peername")[1]
        self._changed(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._current and not self._closing:
            self._current.peer_closed_at = time.monotonic()
        if self._task and self._task is not asyncio.current_task():
            self._task.cancel()
        self._writable.set()
        self._changed(self)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._next_request()

    def _next_request(self) -> None:
        if self._current is not None or not self.open:
            return
        received = self._parse()
        if received is None:
            return
        self._continued = False
        self._current = received
        self.carried_inference |= received.is_inference
        self._task = asyncio.get_running_loop().create_task(self._answer(received))

    async def _answer(self, received: Received) -> None:
        try:
            await self._serve(self, received)
        except ConnectionResetError:
            return
        received.answered_at = time.monotonic()
        self._current = self._task = None
        self._changed(self)
        self._next_request()

    def _parse(self) -> Received | None:
        """The next request once it is here whole, its head bytes dropped from the buffer."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return None
        request_line, *lines = bytes(self._buffer[:end]).split(b"\r\n")
        method, target, _ = request_line.decode("latin-1").split(" ")
        headers = []
        for line in lines:
            name, _, value = line.partition(b":")
            headers.append((name, value.strip(b" \t")))
        lower = {name.lower(): value for name, value in headers}
        if lower.get(b"expect", b"").lower() == b"100-continue" and not self._continued:
            self._continued = True
            assert self.transport is not None
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        taken = self._body(end + 4, lower)
        if taken is None:
            return None
        body, consumed = taken
        del self._buffer[:consumed]
        return Received(
            method, target, headers, body, self.peer_port, self.number, time.monotonic()
        )

    def _body(self, start: int, headers: dict[bytes, bytes]) -> tuple[bytes, int] | None:
        """(body, position behind it), or None while it is not complete."""
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            return self._chunked_body(start)
        end = start + int(headers.get(b"content-length", b"0"))
        return (bytes(self._buffer[start:end]), end) if len(self._buffer) >= end else None

    def _chunked_body(self, at: int) -> tuple[bytes, int] | None:
        body = bytearray()
        while (line_end := self._buffer.find(b"\r\n", at)) >= 0:
            size = int(bytes(self._buffer[at:line_end]).partition(b";")[0], 16)
            data, at = line_end + 2, line_end + 2 + size + 2
            if len(self._buffer) < at:
                return None
            if size == 0:
                return bytes(body), at
            body += self._buffer[data : data + size]
        return None

    async def write(self, data: bytes) -> None:
        """Raises ConnectionResetError when the peer is gone; waits while its buffers are full."""
        if self.transport is None or self.transport.is_closing():
            raise ConnectionResetError
        self.transport.write(data)
        await self._writable.wait()

    def close(self) -> None:
        """An orderly end: FIN behind what was written."""
        self._closing = True
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Break off, with what was not sent yet dropped; `peer_closed_at` is set by it."""
        if self.transport is not None:
            self.transport.abort()

    def reset(self) -> None:
        """RST."""
        self._closing = True
        if self.transport is None:
            return
        linger = struct.pack("ii", 1, 0)
        self.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, linger
        )
        self.transport.abort()


class Writer:
    """One answer, in the framing and the pieces its script wants."""

    def __init__(self, connection: Connection, script: Script, received: Received) -> None:
        self._connection = connection
        self._received = received
        self._head_only = received.method == "HEAD"
        self._script = script
        self._framing: Framing = "length"
        self._head = b""  # waits for the first piece of the body
        self._unframed = bytearray()
        self._position = 0  # in the body, of what was framed
        self._gzip = zlib.compressobj(wbits=31) if script.content_encoding else None

    async def head(self, status: int, headers: Headers, length: int | None) -> None:
        """`length` is the body's size where it is known; a stream has none."""
        for early in self._script.informational:
            line = f"HTTP/1.1 {early} {HTTPStatus(early).phrase}\r\n"
            await self.raw(line.encode() + b"x-early: 1\r\n\r\n")
        script = self._script
        natural: Framing = "chunked" if length is None or self._gzip else "length"
        self._framing = natural if script.framing == "auto" else script.framing
        if status in (204, 304):
            self._framing = "none"
        lines = [(b"date", b"Thu, 01 Jan 2026 00:00:00 GMT"), (b"server", b"uvicorn"), *headers]
        if script.content_encoding:
            lines.append((b"content-encoding", script.content_encoding.encode()))
        lines += [(n.encode("latin-1"), v.encode("latin-1")) for n, v in script.headers]
        if self._framing == "length":
            lines.append((b"content-length", str(length or 0).encode()))
        elif self._framing == "chunked":
            lines.append((b"transfer-encoding", b"chunked"))
        if script.close or self._framing == "eof":
            lines.append((b"connection", b"close"))
        line = f"HTTP/{script.http_version} {status} {HTTPStatus(status).phrase}\r\n".encode()
        head = line + b"".join(b"%b: %b\r\n" % each for each in lines) + b"\r\n"
        if script.head_with_body:
            self._head = head
        else:
            await self.raw(head)

    async def data(self, data: bytes) -> None:
        if self._gzip:
            data = self._gzip.compress(data) + self._gzip.flush(zlib.Z_SYNC_FLUSH)
        if not data or self._head_only:
            return
        self._received.answer_bytes += len(data)
        self._received.answer += data[: ANSWER_KEPT_BYTES - len(self._received.answer)]
        if self._framing != "chunked":
            await self.raw(data)
            return
        self._unframed += data
        while (size := self._frame_size()) and len(self._unframed) >= size:
            frame = bytes(self._unframed[:size])
            del self._unframed[:size]
            await self._frame(frame)

    async def end(self) -> None:
        """The proper end of the body."""
        if not self._head_only:
            if self._gzip:
                rest = self._gzip.flush()
                self._unframed += rest
                self._received.answer += rest
            if self._framing == "chunked":
                if self._unframed:
                    await self._frame(bytes(self._unframed))
                trailers = "".join(f"{n}: {v}\r\n" for n, v in self._script.trailers)
                await self.raw(b"0\r\n" + trailers.encode() + b"\r\n")
            elif self._unframed:
                await self.raw(bytes(self._unframed))
        if self._script.close or self._script.drop_idle or self._framing == "eof":
            self._connection.close()

    def _frame_size(self) -> int:
        if self._script.rechunk_bytes:
            return self._script.rechunk_bytes
        if self._script.rechunk_at is not None:
            later = [p for p in self._script.rechunk_at if p > self._position]
            return min(later) - self._position if later else 1 << 62
        return len(self._unframed)

    async def _frame(self, frame: bytes) -> None:
        self._position += len(frame)
        await self.raw(b"%x\r\n%b\r\n" % (len(frame), frame))

    async def raw(self, data: bytes) -> None:
        data, self._head = self._head + data, b""
        size = self._script.split_bytes
        if not size:
            await self._connection.write(data)
            return
        for at in range(0, len(data), size):
            await self._connection.write(data[at : at + size])
            await asyncio.sleep(0)
