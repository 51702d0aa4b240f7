"""The client's side of one request: what has been sent so far, and how the rest is sent then."""

from __future__ import annotations

from time import monotonic

from starlette.types import Receive, Scope, Send

from gateway.api import errors, wire
from gateway.api.body import discard_body
from gateway.api.client import ClientProtocol, client_of
from gateway.api.dialect import Dialect
from gateway.api.direct import AsgiSender, DirectSender, Sender
from gateway.core.reservation import Reservation

_DISCARD_SECONDS, _SILENT_SECONDS = 10.0, 1.0
_PING = b": ping\n\n"
_STREAM_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"),)


class Outgoing:
    """``started``: a head is out, or about to go with its first bytes. ``streaming``: it was that
    of an event stream. ``direct``: the connection itself, where it is ours.

    ``placement``: why the request went where it went, for a client that asked.
    ``between_events`` is kept by who streams, where heartbeats are wanted: they may not split one.
    """

    def __init__(self, scope: Scope, send: Send, request_id: bytes, dialect: Dialect) -> None:
        self.client: ClientProtocol | None = client_of(scope)
        self.request_id = request_id
        self._dialect = dialect
        self.started = False
        self.streaming = False
        self.sent_at = monotonic()
        self.between_events = True
        self.placement: bytes | None = None
        old = scope.get("http_version") == "1.0"
        self.direct = None if self.client is None else DirectSender(self.client, old)
        self._to: Sender = self.direct or AsgiSender(send)

    async def head(
        self, status: int, headers: wire.Headers, kind: wire.Kind, reservation: Reservation
    ) -> None:
        """The worker's head, with ours; nothing if a heartbeat had to send one before."""
        if self.started:
            return
        self.streaming = kind is wire.Kind.EVENTS
        ours = [
            (b"x-gateway-worker", reservation.worker_id.encode()),
            (b"x-gateway-predicted-cached-tokens", b"%d" % reservation.cached_tokens),
            (b"x-request-id", self.request_id),
        ]
        if self.placement is not None:
            ours.append((b"x-gateway-placement", self.placement))
        self.started = True
        await self._to.start(status, wire.to_client(headers, kind, ours))

    async def flush(self) -> None:
        """Let the head go: what follows it may be long in coming, or be written past us."""
        await self._to.flush()

    async def piece(self, data: bytes) -> None:
        self.sent_at = monotonic()
        await self._to.piece(data)

    async def last(self, data: bytes) -> None:
        await self._to.last(data)

    async def ping(self, reservation: Reservation) -> None:
        """A comment; before the worker's head it takes one of our own with it."""
        await self.head(200, _STREAM_HEADERS, wire.Kind.EVENTS, reservation)
        await self.piece(_PING)

    async def fail(self, error: errors.ApiError, worker: str) -> None:
        """Tell the client: by status while no head is out, then by one event; a plain answer under
        way can only be left incomplete. No finish reason and no ``[DONE]`` is ever invented."""
        if not self.started:
            await self._answer(error, worker)
            return
        if self.streaming:
            await self.error_event(error)
        self.abandon()

    def abandon(self) -> None:
        """The answer ends here, incomplete, and the client must see that it is."""
        self._to.abandon()

    async def refuse_body(self, error: errors.ApiError, receive: Receive) -> None:
        """Answer at once, and close when the client has stopped sending or had time to."""
        await self._answer(error, "", discard=receive)

    async def error_event(self, error: errors.ApiError) -> None:
        """The empty line ends an event of which only a part had come."""
        dialect = self._dialect
        data = dialect.error_line + b"data: " + dialect.error_body(error)
        await self.piece(b"\n\n" + data + b"\n\n")

    async def _answer(
        self, error: errors.ApiError, worker: str, discard: Receive | None = None
    ) -> None:
        body = self._dialect.error_body(error)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self.request_id),
        ]
        if worker:
            headers.append((b"x-gateway-worker", worker.encode()))
        self.started = True
        await self._to.start(error.status, headers + error.headers)
        if discard is not None:
            await self.piece(body)
            body = b""
            await discard_body(discard, _DISCARD_SECONDS, _SILENT_SECONDS)
        await self.last(body)
