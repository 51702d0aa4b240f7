"""One connection to a worker: bytes in, the events of one exchange at a time out.

Rules:
- at most one exchange is active; ``start`` on a busy connection is an error;
- the sink gets ``head`` once, then any number of ``body``, then ``end`` once;
- after ``end(None)`` the connection is reusable if both sides agree, else it is closed;
- interim answers (1xx) are swallowed: the request body is sent at once, nothing waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from gateway.upstream.errors import BadAnswer, NoAnswer, StaleConnection, Truncated, UpstreamError

MAX_HEAD_BYTES = 64 * 1024

Headers = list[tuple[bytes, bytes]]


class Sink(Protocol):
    """Who consumes an exchange; called on the event loop, must not block."""

    def head(self, status: int, headers: Headers) -> None: ...

    def body(self, data: bytes) -> None: ...

    def end(self, error: UpstreamError | None) -> None: ...


class Connection(asyncio.Protocol):
    """An HTTP/1.1 client connection on httptools.

    ``deliver`` takes the body: the sink's ``body``, unless who awaits it puts another in its place.
    ``heard`` is set by each piece of a body. ``at_chunk``: the next byte begins a chunk or the end.
    """

    def __init__(self) -> None:
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)
        self.closed = False
        self.reusable = False
        self.idle_since = 0.0
        self.heard = False
        self.at_chunk = self._in_chunk = False
        self._intercepted = False
        self._sink: Sink | None = None
        # The parser calls this for each piece of a body. Those of one read go to the sink together:
        # a write for each would cost a system call.
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append
        self.deliver: Callable[[bytes], None] = self._pieces.append
        self._exchanges = 0
        self._head_request = False

    # --- transport -> us

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.parse(data)

    def parse(self, data: bytes) -> None:
        if self._sink is None:
            # Bytes that nobody asked for: the connection is out of step.
            self.close()
            return
        if not self._head_done:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(BadAnswer("the worker switched protocols"))
        except httptools.HttpParserError as error:
            self._fail(BadAnswer(f"the worker's answer is not HTTP: {error}"))
        self.at_chunk = not self._in_chunk and self._head_done and data[-2:] == b"\r\n"
        if self._pieces:
            self.heard = True
            self._flush()
        elif not self._head_done and self._head_bytes > MAX_HEAD_BYTES and self._sink is not None:
            self._fail(_too_long())

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._sink is None:
            return
        if self._head_done:
            to_eof = self._until_eof and exc is None
            self._finish(None if to_eof else Truncated("the worker's answer ended early"))
        elif self._exchanges > 1 and not self._head_bytes:
            self._finish(StaleConnection("an idle connection had been closed by the worker"))
        else:
            self._finish(NoAnswer("the worker closed the connection without an answer"))

    # --- the exchange

    def start(self, head: bytes, body: bytes, sink: Sink) -> None:
        """Send one request; events go to ``sink``. ``head`` ends with the empty line."""
        if self._sink is not None:
            raise RuntimeError("the connection is busy")
        self._sink = sink
        self.deliver = sink.body
        self.at_chunk = self._in_chunk = False
        self._exchanges += 1
        self._head_request = head.startswith(b"HEAD ")
        self._head_bytes = 0
        self._head_done = self._until_eof = False
        self._headers: Headers = []
        self._parser = httptools.HttpResponseParser(self)
        if len(body) < 65536:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)

    def intercept(self, receive: Callable[[bytes], None]) -> None:
        """Until the answer's end what the socket brings goes to ``receive``, which sets ``heard``
        and gives ``parse`` what it does not take itself. It may take only whole chunks."""
        self._intercepted = True
        self.data_received = receive  # type: ignore[assignment]
        # uvloop calls the method that it found when it was told of the protocol.
        self.transport.set_protocol(self)

    def _regain(self) -> None:
        if self._intercepted:
            self._intercepted = False
            del self.data_received
            self.transport.set_protocol(self)

    def pause(self) -> None:
        if not self.closed:
            self.transport.pause_reading()

    def resume(self) -> None:
        if not self.closed:
            self.transport.resume_reading()

    def close(self) -> None:
        """Leave now; an active exchange gets no further event."""
        self._sink = None
        self.closed = True
        self._regain()
        self.transport.abort()

    # --- parser -> us

    def on_message_begin(self) -> None:
        if self._sink is None:
            # An answer that nobody asked for, behind the one that has just ended.
            self.reusable = False
        self._headers = []
        self._field_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_done:  # a trailer
            return
        self._field_bytes += len(name) + len(value)
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._sink is None:
            return
        self._head_done = True
        if self._field_bytes > MAX_HEAD_BYTES:
            self._fail(_too_long())
            return
        framed = any(_frames(name, value) for name, value in self._headers)
        bodiless = status in (204, 304) or self._head_request
        self._until_eof = not framed and not bodiless
        self._sink.head(status, self._headers)
        if self._head_request:
            # The parser cannot know that no body follows a HEAD; do not reuse the connection.
            self._finish(None)
            self.close()

    def on_chunk_header(self) -> None:
        self._in_chunk = True

    def on_chunk_complete(self) -> None:
        self._in_chunk = False

    def on_message_complete(self) -> None:
        if not self._head_done or self._sink is None:
            return
        self.reusable = not self._until_eof and self._parser.should_keep_alive()
        self._finish(None)

    def _fail(self, error: UpstreamError) -> None:
        self._finish(error)
        self.close()

    def _flush(self) -> None:
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self._sink is not None:
            self.deliver(data)

    def _finish(self, error: UpstreamError | None) -> None:
        """The last pieces go to the sink itself: it can hand them on together with the end."""
        sink, self._sink = self._sink, None
        self._regain()
        if self._pieces and sink is not None:
            data = b"".join(self._pieces)
            self._pieces.clear()
            sink.body(data)
        if error is not None:
            self.reusable = False
        if sink is not None:
            sink.end(error)


def _too_long() -> BadAnswer:
    return BadAnswer(f"the worker's head exceeds {MAX_HEAD_BYTES} bytes")


def _frames(name: bytes, value: bytes) -> bool:
    """Whether a header says where the body ends."""
    chunked = name == b"transfer-encoding" and b"chunked" in value.lower()
    return chunked or name == b"content-length"
