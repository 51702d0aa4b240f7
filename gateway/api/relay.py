"""The ASGI endpoint that owns one proxied request from its first byte to its end.

Phases: read the body, learn what routing must know, place, connect, wait for the head, stream.
In each the client may leave: the watch then ends the request's own task, so that one ``finally``
gives back the connection and the reservation, whatever happened and wherever.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

from starlette.types import Receive, Scope, Send

from gateway.api import errors, wire
from gateway.api.body import ClientGone, ClientWatch, read_body
from gateway.api.client import ClientProtocol, client_of
from gateway.api.deps import Deps
from gateway.api.sse import EventStream, PlainAnswer
from gateway.core.router import NoWorker, Request, Result
from gateway.core.worker import Reservation, WorkerId
from gateway.observe.record import Outcome, Record
from gateway.upstream.errors import ConnectFailed, HeadTimeout, IdleTimeout, UpstreamError
from gateway.upstream.exchange import Exchange

log = logging.getLogger(__name__)

_RETRY_SECONDS = 5


class Relay:
    """Endpoint for one path that takes a prompt."""

    def __init__(self, deps: Deps, endpoint: str) -> None:
        self._deps = deps
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _Relayed(self._deps, scope, send).run(self._endpoint, receive)


class _Relayed:
    """One request. Its outcome stands in ``record`` before each step that may be its last."""

    def __init__(self, deps: Deps, scope: Scope, send: Send) -> None:
        self._deps = deps
        self._scope = scope
        self._send = send
        self._client = client_of(scope)
        self._started = self._streaming = False
        self._request_id = wire.request_id(scope["headers"], deps.fresh_id())
        self.record = Record(monotonic())

    async def run(self, endpoint: str, receive: Receive) -> None:
        try:
            body = await read_body(self._scope, receive, self._deps.limits.max_body_bytes)
            self.record.body_read_at = monotonic()
            async with ClientWatch(receive, self._client) as self._watch:
                await self._serve(endpoint, body)
        except ClientGone:
            self.record.outcome = Outcome.CLIENT_GONE
        except errors.ApiError as error:
            if error.status == 413:
                self.record.outcome = Outcome.REFUSED
                log.warning("request %s refused: %s", self._request_id.decode(), error.message)
            await self._answer_error(error)
        except asyncio.CancelledError:
            await self._stopped()
        finally:
            self._deps.metrics.request_ended(self.record, monotonic())

    async def _stopped(self) -> None:
        """The server ends and waits no longer: say so, and leave the answer visibly broken."""
        error = errors.stopping()
        if self._started:
            self.record.outcome = Outcome.UPSTREAM_TRUNCATED
            if self._streaming:
                await self._send_body(_event(error))
        else:
            self.record.outcome = Outcome.REFUSED
            await self._answer_error(error)

    async def _serve(self, endpoint: str, body: bytes) -> None:
        call = wire.parse_call(body)
        if call.parsed:
            prompt, self.record.fallback = await self._deps.prompts.read(endpoint, call.fields)
        else:
            prompt, self.record.fallback = None, "unparsed"
        request = Request(prompt, call.model, call.max_tokens, call.stream)
        path = self._scope["raw_path"]
        if self._scope["query_string"]:
            path += b"?" + self._scope["query_string"]
        headers = wire.to_worker(self._scope["headers"], self._request_id)
        target = wire.Target(self._scope["method"].encode(), path, headers)
        await self._place(request, target, body, withhold=not call.wants_usage)

    async def _place(
        self, request: Request, target: wire.Target, body: bytes, withhold: bool
    ) -> None:
        """Try workers until one has the request: one that cannot be reached never had it."""
        tried: set[WorkerId] = set()
        while True:
            try:
                reservation = self._deps.router.admit(request, monotonic(), tried)
            except NoWorker as error:
                self.record.outcome = Outcome.REFUSED
                raise errors.no_worker(error, _RETRY_SECONDS) from error
            self.record.placed(reservation, monotonic())
            try:
                await self._carry(reservation, target, body, withhold)
                return
            except UpstreamError as error:
                self.record.outcome = _outcome(error)
                if error.processed:
                    raise errors.upstream_failed(error) from error
                tried.add(reservation.worker_id)
                if isinstance(error, ConnectFailed):
                    self._deps.unreachable(reservation.worker_id, str(error))

    async def _carry(
        self, reservation: Reservation, target: wire.Target, body: bytes, withhold: bool
    ) -> None:
        """One attempt on one worker; raises UpstreamError only while no head of ours is out."""
        limits = self._deps.limits
        pool = self._deps.pools[reservation.worker_id]
        exchange = Exchange(pool, limits.head_seconds, limits.idle_seconds)
        try:
            head = wire.request_head(target, pool.authority, pool.prefix, len(body))
            await exchange.open(head, body)
            self.record.computed = exchange.status < 400
            if wire.is_event_stream(exchange.headers) and not wire.is_encoded(exchange.headers):
                await self._stream(exchange, reservation, EventStream(withhold))
            else:
                await self._answer(exchange, reservation)
        except UpstreamError:
            self.record.computed = False
            raise
        finally:
            exchange.close()
            result = Result(self.record.usage, self.record.computed)
            self._deps.router.settle(reservation, result, monotonic())

    async def _answer(self, exchange: Exchange, reservation: Reservation) -> None:
        """An answer in one body. Its first bytes are awaited before our head goes out."""
        answer = PlainAnswer()
        data = await exchange.read()
        self.record.first_byte_at = monotonic()
        await self._send_head(exchange, reservation)
        try:
            while data and not exchange.complete:
                answer.feed(data)
                await self._send_body(data)
                data = await exchange.read()
        except UpstreamError:
            # The announced length or the last chunk stays missing: the client sees a broken body.
            self.record.outcome = Outcome.UPSTREAM_TRUNCATED
            return
        answer.feed(data)
        self._ended(answer, exchange.status)
        await self._send_last(data)

    async def _stream(
        self, exchange: Exchange, reservation: Reservation, answer: EventStream
    ) -> None:
        await self._send_head(exchange, reservation)
        self._streaming = True
        try:
            data = await exchange.read()
            self._deps.router.prefilled(reservation, monotonic())
            self.record.first_byte_at = monotonic()
            if passed := answer.feed(data):
                await self._send_body(passed)
            if self._client is not None and self._client.takes_chunks(self._scope):
                await self._forward(exchange, answer, self._client)
            else:
                while data := await exchange.read():
                    if passed := answer.feed(data):
                        await self._send_body(passed)
        except UpstreamError as error:
            self.record.outcome = _outcome(error, streaming=True)
            await self._send_body(_in_band(error))
            return
        self._ended(answer, exchange.status)
        if answer.ended:
            await self._send_last(answer.finish())
        else:
            await self._send_body(answer.finish() + _in_band(UpstreamError("it ended early")))

    async def _forward(
        self, exchange: Exchange, answer: EventStream, client: ClientProtocol
    ) -> None:
        """The rest of a stream, each piece written to the client as it comes from the worker."""

        def forward(data: bytes) -> None:
            if passed := answer.feed(data):
                client.write_chunk(passed)

        client.paused, client.resumed = exchange.pause, exchange.resume
        if client.blocked:
            exchange.pause()
        try:
            await exchange.divert(forward)
        finally:
            client.paused = client.resumed = None

    def _ended(self, answer: EventStream | PlainAnswer, status: int) -> None:
        """The worker's bytes are complete as HTTP; whether they are as an answer is seen here."""
        if status >= 400:
            refused = status in (429, 503)
            failed = Outcome.UPSTREAM_ERROR if status >= 500 else Outcome.OK
            self.record.outcome = Outcome.REFUSED if refused else failed
            return
        self.record.answered = True
        self.record.usage = answer.usage
        self.record.outcome = Outcome.OK if answer.complete else Outcome.UPSTREAM_TRUNCATED

    async def _send_head(self, exchange: Exchange, reservation: Reservation) -> None:
        ours = [
            (b"x-gateway-worker", reservation.worker_id.encode()),
            (b"x-gateway-predicted-cached-tokens", b"%d" % reservation.cached_tokens),
            (b"x-request-id", self._request_id),
        ]
        await self._start(exchange.status, wire.to_client(exchange.headers, ours))

    async def _answer_error(self, error: errors.ApiError) -> None:
        body = error.body
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self._request_id),
        ]
        if self.record.worker:
            headers.append((b"x-gateway-worker", self.record.worker.encode()))
        await self._start(error.status, headers + error.headers)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send_body(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _send_last(self, data: bytes) -> None:
        self._watch.stop()
        await self._send({"type": "http.response.body", "body": data, "more_body": False})


def _outcome(error: UpstreamError, streaming: bool = False) -> Outcome:
    if isinstance(error, (HeadTimeout, IdleTimeout)):
        return Outcome.TIMEOUT
    return Outcome.UPSTREAM_TRUNCATED if streaming else Outcome.UPSTREAM_ERROR


def _in_band(error: UpstreamError) -> bytes:
    """The one event that tells a streaming client of a failure; no finish reason is invented.

    The empty line first ends an event of which only a part had come.
    """
    return _event(errors.upstream_failed(error))


def _event(error: errors.ApiError) -> bytes:
    return b"\n\ndata: " + error.body + b"\n\n"
