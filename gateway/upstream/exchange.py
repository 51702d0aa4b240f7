"""One request to a worker and its answer: the sink of the connection, awaited by the relay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.upstream.errors import HeadTimeout, IdleTimeout, StaleConnection, UpstreamError
from gateway.upstream.pool import Pool
from gateway.upstream.protocol import Connection, Headers

HIGH_WATER_BYTES = 256 * 1024
"""Unread body at which the worker's socket is paused."""

_IDLE_LOOKS = 4
"""A diverted body is looked at so often per idle limit: cheaper than noting the time of each piece,
and late by a quarter of the limit at most."""


class Exchange:
    """Head, then body, of one answer; ``close`` must be called exactly once, whatever happened.

    The body is read either piece by piece (``read``) or handed on as it comes (``divert``).
    Limits: ``head_seconds`` from the request to the head, ``idle_seconds`` between body bytes while
    the reader takes them; there is no limit on the whole.
    """

    __slots__ = (
        "_chunks", "_connection", "_ended", "_error", "_head_seconds", "_idle_seconds", "_loop",
        "_paused", "_pool", "_slow", "_unread_bytes", "_waiter", "headers", "status",
    )  # fmt: skip

    def __init__(self, pool: Pool, head_seconds: float, idle_seconds: float) -> None:
        self.status = 0
        self.headers: Headers = []
        self._loop = asyncio.get_running_loop()
        self._pool = pool
        self._head_seconds = head_seconds
        self._idle_seconds = idle_seconds
        self._connection: Connection | None = None
        self._chunks: list[bytes] = []
        self._unread_bytes = 0
        self._paused = self._slow = False
        self._ended = False
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[bool] | None = None

    @property
    def complete(self) -> bool:
        """Whether all of the answer has been read, and came to its proper end."""
        return self._ended and not self._chunks and self._error is None

    async def open(self, head: bytes, body: bytes) -> None:
        """Send the request and wait for the head; raises UpstreamError.

        A reused connection that turns out to be stale is replaced by a fresh one, once.
        """
        self._connection = self._pool.reuse()
        if self._connection is not None:
            try:
                await self._send(self._connection, head, body)
                return
            except StaleConnection:
                self._release()
                self._ended, self._error = False, None
        self._connection = await self._pool.connect()
        await self._send(self._connection, head, body)

    async def read(self) -> bytes:
        """The body bytes that have arrived, at least one; empty at the end. Raises UpstreamError.

        What arrived before a failure is handed out first.
        """
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self._ended:
                return b""
            if not await self._woken(self._idle_seconds):
                raise self._idle()
        return self._take()

    async def divert(
        self, forward: Callable[[bytes], None], through: Callable[[bytes], bool] | None = None
    ) -> None:
        """Give each further piece of the body to ``forward`` as it comes, until the body's end.

        ``through``, if given, first gets what the socket brought where a chunk begins, and may take
        it as it is. Both are called on the event loop and must not block. Raises UpstreamError.
        """
        if self._chunks:
            forward(self._take())
        connection = self._connection
        if connection is not None and not self._ended:
            connection.deliver = forward
            connection.through = through
        silent = 0
        while not self._ended and not await self._woken(self._idle_seconds / _IDLE_LOOKS):
            heard = connection is not None and connection.heard
            silent = 0 if heard or self._paused else silent + 1
            if connection is not None:
                connection.heard = False
            if silent >= _IDLE_LOOKS:
                raise self._idle()
        if self._error is not None:
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

    # --- the sink of the connection

    def head(self, status: int, headers: Headers) -> None:
        self.status = status
        self.headers = headers
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
        connection.start(head, body, self)
        while not self.status:
            if self._error is not None:
                raise self._error
            if not await self._woken(self._head_seconds):
                raise HeadTimeout(f"no answer within {self._head_seconds:g} s")

    def _take(self) -> bytes:
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._unread_bytes = 0
        self._regulate()
        return data

    def _idle(self) -> IdleTimeout:
        return IdleTimeout(f"nothing more for {self._idle_seconds:g} s")

    async def _woken(self, seconds: float) -> bool:
        """Wait for an event of the connection; False if there is none in time."""
        waiter = self._waiter = self._loop.create_future()
        timer = self._loop.call_later(seconds, _expire, waiter)
        try:
            woken: bool = await waiter
            return woken
        finally:
            timer.cancel()
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
            self._waiter.set_result(True)

    def _release(self) -> None:
        connection = self._connection
        if connection is not None:
            self._slow, self._unread_bytes = False, 0
            self._regulate()
            self._connection = None
            self._pool.release(connection)


def _expire(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
