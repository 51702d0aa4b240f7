"""The ASGI endpoint that owns one proxied request from its first byte to its end.

Phases: read the body, learn what routing must know, place, connect, wait for the head, stream.
In each the client may leave: the watch then ends the request's own task, so that one ``finally``
gives back the connection and the reservation, whatever happened and wherever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from gateway.api import errors, wire
from gateway.api.body import ClientGone, ClientWatch, read_body
from gateway.api.deps import Deps
from gateway.api.dialect import Dialect
from gateway.api.direct import DirectSender
from gateway.api.explain import in_header
from gateway.api.heartbeat import beating
from gateway.api.outgoing import Outgoing
from gateway.api.sse import EventStream, PlainAnswer
from gateway.api.through import let_through
from gateway.core.request import Request, Result
from gateway.core.reservation import Reservation, WorkerId
from gateway.core.router import NoWorker
from gateway.observe.record import Outcome, Record
from gateway.prompt.reader import UNREAD
from gateway.upstream.errors import ConnectFailed, HeadTimeout, IdleTimeout, UpstreamError
from gateway.upstream.exchange import Exchange

log = logging.getLogger(__name__)

T = TypeVar("T")

_LOST = "worker %s does not find what it had cached: its cache is taken as empty"

_RETRY_SECONDS = 5
_MOST_ERROR_BYTES = 64 * 1024


class Relay:
    """Endpoint for one path that takes a prompt."""

    def __init__(self, deps: Deps, dialect: Dialect) -> None:
        self._deps = deps
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _Relayed(self._deps, self._dialect, scope, send).run(receive)


class _Relayed:
    """One request. Its outcome stands in ``record`` before each step that may be its last."""

    def __init__(self, deps: Deps, dialect: Dialect, scope: Scope, send: Send) -> None:
        self._deps = deps
        self._dialect = dialect
        self._scope = scope
        identity = wire.request_id(scope["headers"], deps.fresh_id())
        self._out = Outgoing(scope, send, identity, dialect)
        self._reading = UNREAD
        self.record = Record(monotonic(), dialect.endpoint, identity)

    async def run(self, receive: Receive) -> None:
        record = self.record
        try:
            body = await read_body(self._scope, receive, self._deps.max_body_bytes)
            record.body_read_at = monotonic()
            async with ClientWatch(receive, self._out.client) as self._watch:
                await self._serve(body)
        except ClientGone:
            record.outcome = Outcome.CLIENT_GONE
        except errors.ApiError as error:
            if error.status == 413:
                record.outcome = Outcome.REFUSED
                log.warning("request %s refused: %s", self._out.request_id.decode(), error.message)
                await self._out.refuse_body(error, receive)
            else:
                await self._out.fail(error, record.worker)
        except asyncio.CancelledError:
            # The server ends and waits no longer.
            started = self._out.started
            record.outcome = Outcome.UPSTREAM_TRUNCATED if started else Outcome.REFUSED
            await self._out.fail(errors.stopping(), record.worker)
        finally:
            now = monotonic()
            self._deps.metrics.request_ended(record, now)
            self._deps.journal.request_ended(record, now)

    async def _serve(self, body: bytes) -> None:
        call = wire.parse_call(body)
        if call.parsed:
            read = self._deps.prompts.read
            self._reading = await read(self._dialect.endpoint, call.fields)
        self.record.fallback = self._reading.fallback
        prompt = self._reading.prompt
        hints = wire.hints(self._scope["headers"], call.fields)
        self._debug = hints.debug
        request = Request(prompt, call.model, call.max_tokens, call.stream, hints.session)
        path = self._scope["raw_path"]
        if self._scope["query_string"]:
            path += b"?" + self._scope["query_string"]
        headers = wire.to_worker(self._scope["headers"], self._out.request_id)
        target = wire.Target(self._scope["method"].encode(), path, headers)
        await self._place(request, target, body, self._dialect.adds_usage and not call.wants_usage)

    async def _place(
        self, request: Request, target: wire.Target, body: bytes, withhold: bool
    ) -> None:
        """Try workers until one has the request: one that cannot be reached never had it."""
        tried: set[WorkerId] = set()
        while True:
            if self._debug:
                self._out.placement = in_header(self._deps.router, request, monotonic())
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
        """One attempt on one worker; raises UpstreamError only while no answer of it is out."""
        pool = self._deps.pools[reservation.worker_id]
        exchange = Exchange(pool)
        try:
            head = wire.request_head(target, pool.authority, pool.prefix, len(body))
            await self._beating(exchange.open(head, body), reservation, reservation.stream)
            kind = wire.kind_of(exchange.headers)
            # The head of a stream comes before its prompt is computed, that of an answer after.
            self.record.computed = exchange.status < 400 and kind is not wire.Kind.EVENTS
            if kind is wire.Kind.EVENTS:
                await self._stream(exchange, reservation, EventStream(withhold, self._dialect))
            elif self._out.started:
                await self._refused_late(exchange)
            else:
                await self._answer(exchange, reservation, kind)
        except UpstreamError:
            self.record.computed = False
            raise
        finally:
            exchange.close()
            result = Result(self.record.usage, self.record.computed)
            if self._deps.router.settle(reservation, result, monotonic()):
                worker = reservation.worker_id
                log.warning(_LOST, worker)

    async def _answer(self, exchange: Exchange, reservation: Reservation, kind: wire.Kind) -> None:
        """An answer in one body. Its first bytes are awaited before our head goes out."""
        answer = PlainAnswer(self._dialect)
        data = await exchange.read()
        self.record.first_byte_at = monotonic()
        await self._out.head(exchange.status, exchange.headers, kind, reservation)
        try:
            while data and not exchange.complete:
                answer.feed(data)
                await self._out.piece(data)
                data = await exchange.read()
        except UpstreamError:
            # The announced length or the last chunk stays missing: the client sees a broken body.
            self.record.outcome = Outcome.UPSTREAM_TRUNCATED
            self._out.abandon()
            return
        answer.feed(data)
        self._ended(answer, exchange.status)
        self._watch.stop()
        await self._out.last(data)

    async def _refused_late(self, exchange: Exchange) -> None:
        """A heartbeat had already sent our head: the worker's own error goes into the stream."""
        body = b""
        while data := await exchange.read():
            body = (body + data)[:_MOST_ERROR_BYTES]
        self._ended(PlainAnswer(), exchange.status)
        await self._out.error_event(errors.told_by_worker(exchange.status, body))
        self._out.abandon()

    async def _stream(
        self, exchange: Exchange, reservation: Reservation, answer: EventStream
    ) -> None:
        out = self._out
        await out.head(exchange.status, exchange.headers, wire.Kind.EVENTS, reservation)
        try:
            rest = await self._pass_on(exchange, answer, reservation)
        except UpstreamError as error:
            self.record.outcome = _outcome(error, streaming=True)
            await out.fail(errors.upstream_failed(error), self.record.worker)
            return
        self._ended(answer, exchange.status)
        if answer.ended:
            self._watch.stop()
            await out.last(rest)
            return
        if rest:
            await out.piece(rest)
        broken = errors.upstream_failed(UpstreamError("its stream has no end"))
        await out.fail(broken, self.record.worker)

    async def _pass_on(
        self, exchange: Exchange, answer: EventStream, reservation: Reservation
    ) -> bytes:
        """Pass the stream on as it comes, up to its last bytes: these are returned."""
        out = self._out
        if not exchange.readable:
            await out.flush()
        data = await self._beating(exchange.read(), reservation, True)
        self.record.first_byte_at = monotonic()
        self._deps.router.prefilled(reservation, self.record.first_byte_at)
        self.record.computed = exchange.status < 400
        while not exchange.complete:
            if passed := answer.feed(data):
                await out.piece(passed)
            if out.direct is not None and self._deps.heartbeat_seconds is None:
                await self._forward(exchange, answer, out.direct)
            out.between_events = answer.between_events
            data = await self._beating(exchange.read(), reservation, True)
        return answer.feed(data) + answer.finish()

    async def _forward(self, exchange: Exchange, answer: EventStream, sender: DirectSender) -> None:
        """The rest of a stream, each piece written to the client as it comes from the worker."""
        await sender.flush()
        feed, client = answer.feed, sender.client
        write = sender.write_chunk if sender.chunked else sender.write

        def forward(data: bytes) -> None:
            if passed := feed(data):
                write(passed)

        client.paused, client.resumed = exchange.pause, exchange.resume
        if client.blocked:
            exchange.pause()
        try:
            through = partial(let_through, answer, transport=sender.transport)
            await exchange.divert(forward, through if sender.chunked else None)
        finally:
            client.paused = client.resumed = None

    async def _beating(
        self, work: Coroutine[Any, Any, T], reservation: Reservation, streaming: bool
    ) -> T:
        """Await ``work``; in a stream, heartbeats go out meanwhile if they are wanted."""
        seconds = self._deps.heartbeat_seconds
        if seconds is None or not streaming:
            return await work
        return await beating(work, seconds, self._out, reservation)

    def _ended(self, answer: EventStream | PlainAnswer, status: int) -> None:
        """The worker's bytes are complete as HTTP; whether they are as an answer is seen here."""
        if status >= 400:
            refused = status in (429, 503)
            failed = Outcome.UPSTREAM_ERROR if status >= 500 else Outcome.OK
            self.record.outcome = Outcome.REFUSED if refused else failed
            return
        self.record.answered = True
        usage = self.record.usage = answer.usage
        if not answer.complete:
            self.record.outcome = Outcome.UPSTREAM_TRUNCATED
            return
        self.record.outcome = Outcome.OK
        tokens = self._reading.tokens
        # Only the usage of a whole answer is that of all its prompts.
        if usage is not None and tokens is not None and usage.prompt_tokens != tokens:
            self._deps.prompts.answered(self._reading, usage.prompt_tokens)


def _outcome(error: UpstreamError, streaming: bool = False) -> Outcome:
    if isinstance(error, (HeadTimeout, IdleTimeout)):
        return Outcome.TIMEOUT
    return Outcome.UPSTREAM_TRUNCATED if streaming else Outcome.UPSTREAM_ERROR
