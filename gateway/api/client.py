"""The client's connection, open to the relay: uvicorn's own protocol with three hooks.

What ASGI hides costs a task switch each: that the client has left (a second task would have to wait
for it), that its socket takes no more, and, worst, every chunk of a stream. With this protocol the
relay hears of the first two by a call, and writes chunks straight to the transport. On any other
server the same relay runs through plain ASGI; the tests run it both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_KEY = "gateway.client"
_SIZES = tuple(b"%x\r\n" % size for size in range(2048))
"""The lines before chunks of usual sizes, made once: this is the hottest path that there is."""


class ClientProtocol(HttpToolsProtocol):
    """``gone``, ``paused`` and ``resumed`` are called on the event loop while they are set."""

    gone: Callable[[], None] | None = None
    paused: Callable[[], None] | None = None
    resumed: Callable[[], None] | None = None
    lost = False

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(dict[str, Any], self.scope)["extensions"] = {_KEY: self}

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
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

    def takes_chunks(self, scope: Scope) -> bool:
        """Whether the answer to ``scope`` is under way here in chunks that may be written raw."""
        cycle = self.cycle
        return cycle.scope is scope and bool(cycle.chunked_encoding) and not cycle.disconnected

    def write_chunk(self, data: bytes) -> None:
        transport = self.transport
        if not transport.is_closing():
            size = len(data)
            head = _SIZES[size] if size < len(_SIZES) else b"%x\r\n" % size
            transport.write(b"".join((head, data, b"\r\n")))

    def write_raw(self, data: bytes) -> None:
        """Whole chunks, framed already."""
        if not self.transport.is_closing():
            self.transport.write(data)

    @property
    def blocked(self) -> bool:
        return self.flow.write_paused


def client_of(scope: Scope) -> ClientProtocol | None:
    """The connection behind a request; None on a server that has no such protocol."""
    found: ClientProtocol | None = scope.get("extensions", {}).get(_KEY)
    return found
