"""One request to a worker and its answer, awaited: the sink that the relay reads from."""

from __future__ import annotations

import asyncio

from gateway.upstream.errors import HeadTimeout, IdleTimeout, StaleConnection, UpstreamError
from gateway.upstream.pool import Pool
from gateway.upstream.protocol import Connection, Headers

HIGH_WATER_BYTES = 256 * 1024
"""Unread body at which the worker's socket is paused."""


class Exchange:
    """Head, then body, of one answer; ``close`` must be called exactly once, whatever happened.

    Limits: ``head_seconds`` from the request to the head, ``idle_seconds`` between body bytes;
    there is no limit on the whole.
    """

    def __init__(self, pool: Pool, head_seconds: float, idle_seconds: float) -> None:
        self.status = 0
        self.headers: Headers = []
        self._pool = pool
        self._head_seconds = head_seconds
        self._idle_seconds = idle_seconds
        self._connection: Connection | None = None
        self._chunks: list[bytes] = []
        self._unread_bytes = 0
        self._paused = False
        self._ended = False
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None

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
        if not self._chunks and not self._ended:
            await self._wait(self._idle_seconds, IdleTimeout)
        if self._chunks:
            data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
            self._chunks.clear()
            self._unread_bytes = 0
            if self._paused and self._connection is not None:
                self._paused = False
                self._connection.resume()
            return data
        if self._error is not None:
            raise self._error
        return b""

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
        if self._unread_bytes > HIGH_WATER_BYTES and not self._paused and self._connection:
            self._paused = True
            self._connection.pause()
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
            await self._wait(self._head_seconds, HeadTimeout)

    async def _wait(self, seconds: float, error: type[UpstreamError]) -> None:
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        timer = loop.call_later(seconds, _expire, waiter, error(f"nothing for {seconds:g} s"))
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _release(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            if self._paused and not connection.closed:
                connection.resume()
                self._paused = False
            self._pool.release(connection)


def _expire(waiter: asyncio.Future[None], error: UpstreamError) -> None:
    if not waiter.done():
        waiter.set_exception(error)
