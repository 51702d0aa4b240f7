"""The client's connection, open to the relay: uvicorn's own protocol with three hooks.

What ASGI hides costs a task switch each: that the client has left (a second task would have to wait
for it), that its socket takes no more, and, worst, every chunk of a stream. With this protocol the
relay hears of the first two by a call, and writes chunks straight to the transport. On any other
server the same relay runs through plain ASGI; the tests run it both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.api import errors
from gateway.api.pace import Pace

_KEY = "gateway.client"
MAX_HEAD_BYTES = 64 * 1024
"""Of a request: its line and headers."""

_MOST_PIPELINED = 16


class ClientProtocol(HttpToolsProtocol):
    """``gone``, ``paused`` and ``resumed`` are called on the event loop while they are set."""

    gone: Callable[[], None] | None = None
    paused: Callable[[], None] | None = None
    resumed: Callable[[], None] | None = None
    lost = False
    running: Any = None
    """uvicorn's state of the request whose answer is due: the first of those in the pipeline."""

    _in_head = True
    _head_bytes = 0

    def __init__(self, pace: Pace, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pace = pace

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(dict[str, Any], self.scope)["extensions"] = {_KEY: self}

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"the request's head exceeds {MAX_HEAD_BYTES} bytes")

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._head_bytes > MAX_HEAD_BYTES and self._size_of_head() > MAX_HEAD_BYTES:
            self._refuse(431, f"the request's head exceeds {MAX_HEAD_BYTES} bytes")
            return
        super().on_headers_complete()
        if self.pipeline and len(self.pipeline) <= _MOST_PIPELINED:
            # uvicorn stops reading until the answer under way is complete, and would not see that
            # the client leaves.
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._pace.begin(self.loop, partial(self._start, cycle, app))

    def _start(self, cycle: Any, app: Any) -> None:
        self.running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        if not self.transport.is_closing():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        """An answer to what cannot be made a request of; the connection ends with it."""
        body = errors.openai_body(errors.for_status(status, message))
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%b"
            % (status, HTTPStatus(status).phrase.encode(), len(body), body)
        )
        self.transport.close()

    def _size_of_head(self) -> int:
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self.running is not None and not self.running.response_complete:
            # uvicorn tells only the request that came last.
            self.running.disconnected = True
        super().connection_lost(exc)
        if self.gone is not None:
            self.gone()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.paused is not None:
            self.paused()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.resumed is not None:
            self.resumed()

    @property
    def blocked(self) -> bool:
        return self.flow.write_paused


def client_of(scope: Scope) -> ClientProtocol | None:
    """The connection behind a request; None on a server that has no such protocol."""
    found: ClientProtocol | None = scope.get("extensions", {}).get(_KEY)
    return found
