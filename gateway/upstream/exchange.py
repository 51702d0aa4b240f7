"""One request to a worker and its answer: the sink of the connection, awaited by the relay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.upstream.errors import HeadTimeout, IdleTimeout, StaleConnection, UpstreamError
from gateway.upstream.pool import Pool
from gateway.upstream.protocol import Connection, Headers

HIGH_WATER_BYTES = 64 * 1024
"""Unread body at which the worker's socket is paused."""


class Exchange:
    """Head, then body, of one answer; ``close`` must be called exactly once, whatever happened.

    The body is read either piece by piece (``read``) or handed on as it comes (``divert``). The
    pool's limits hold: ``head_seconds`` from the request to the head, ``idle_seconds`` between body
    bytes while somebody waits for them; there is none on the whole. The pool looks at all its
    exchanges together, a few times per limit: a timer for each would cost more than the rest.
    """

    __slots__ = (
        "_chunks", "_connection", "_due", "_ended", "_error", "_loop", "_paused", "_pool", "_slow",
        "_unread_bytes", "_waiter", "headers", "status",
    )  # fmt: skip

    def __init__(self, pool: Pool) -> None:
        self.status = 0
        self.headers: Headers = []
        self._loop = pool.loop
        self._pool = pool
        self._connection: Connection | None = None
        self._chunks: list[bytes] = []
        self._unread_bytes = 0
        self._paused = self._slow = False
        self._ended = False
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._due = 0.0

    @property
    def complete(self) -> bool:
        """Whether all of the answer has been read, and came to its proper end."""
        return self._ended and not self._chunks and self._error is None

    @property
    def readable(self) -> bool:
        """Whether ``read`` would not wait."""
        return bool(self._chunks) or self._ended

    async def open(self, head: bytes, body: bytes) -> None:
        """Send the request and wait for the head; raises UpstreamError.

        A reused connection that turns out to be stale is replaced by a fresh one, once.
        """
        connection = self._pool.reuse()
        if connection is not None:
            try:
                await self._send(connection, head, body)
                return
            except StaleConnection:
                self._release()
                self._ended, self._error = False, None
        await self._send(await self._pool.connect(), head, body)

    async def read(self) -> bytes:
        """The body bytes that have arrived, at least one; empty at the end. Raises UpstreamError.

        What arrived before a failure is handed out first.
        """
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self._ended:
                return b""
            await self._woken()
        return self._take()

    async def divert(
        self,
        forward: Callable[[bytes], None],
        interceptor: Callable[[Connection], Callable[[bytes], None]] | None = None,
    ) -> None:
        """Give each further piece of the body to ``forward`` as it comes; returns when the body has
        ended. What came together with its end is left to be read.

        ``interceptor``, if given, makes the function that gets the bytes of the socket before they
        are parsed: ``Connection.intercept`` says what it must do. Both are called on the event loop
        and must not block. Raises UpstreamError.
        """
        connection = self._connection
        if connection is not None and not self._ended:
            if self._chunks:
                forward(self._take())
            connection.deliver = forward
            if interceptor is not None:
                connection.intercept(interceptor(connection))
        while not self._ended:
            await self._woken()
        if self._error is not None:
            if self._chunks:
                forward(self._take())
            raise self._error

    def pause(self) -> None:
        """Take no more from the worker: who reads is slower."""
        self._slow = True
        self._regulate()

    def resume(self) -> None:
        self._slow = False
        self._regulate()

    def close(self) -> None:
        """Give the connection back; an unfinished answer closes it, which stops the worker."""
        if self._connection is not None:
            if not self._ended:
                self._connection.close()
            self._release()

    def look(self, now: float) -> None:
        """End what has been silent for too long; ``now`` in the loop's time."""
        connection = self._connection
        if connection is None or self._ended:
            return
        if self.status and (connection.heard or self._paused or self._waiter is None):
            connection.heard = False
            self._due = now + self._pool.limits.idle_seconds
        elif now >= self._due:
            connection.close()
            self.end(self._silence())

    # --- the sink of the connection

    def head(self, status: int, headers: Headers) -> None:
        self.status = status
        self.headers = headers
        self._due = self._loop.time() + self._pool.limits.idle_seconds
        self._wake()

    def body(self, data: bytes) -> None:
        self._chunks.append(data)
        self._unread_bytes += len(data)
        if self._unread_bytes > HIGH_WATER_BYTES:
            self._regulate()
        self._wake()

    def end(self, error: UpstreamError | None) -> None:
        self._ended = True
        self._error = error
        self._wake()

    # ---

    async def _send(self, connection: Connection, head: bytes, body: bytes) -> None:
        self._connection = connection
        self._due = self._loop.time() + self._pool.limits.head_seconds
        self._pool.watch(connection, self.look)
        connection.start(head, body, self)
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._woken()

    def _take(self) -> bytes:
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._unread_bytes = 0
        self._regulate()
        return data

    def _silence(self) -> UpstreamError:
        limits = self._pool.limits
        if not self.status:
            return HeadTimeout(f"no answer within {limits.head_seconds:g} s")
        return IdleTimeout(f"nothing more for {limits.idle_seconds:g} s")

    async def _woken(self) -> None:
        """Wait for an event of the connection."""
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _regulate(self) -> None:
        """The worker's socket is paused while the reader is slow or has too much unread."""
        wanted = self._slow or self._unread_bytes > HIGH_WATER_BYTES
        if wanted == self._paused or self._connection is None:
            return
        self._paused = wanted
        self._connection.heard = True
        if wanted:
            self._connection.pause()
        else:
            self._connection.resume()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _release(self) -> None:
        connection = self._connection
        if connection is not None:
            self._slow, self._unread_bytes = False, 0
            self._regulate()
            self._connection = None
            self._pool.release(connection)
