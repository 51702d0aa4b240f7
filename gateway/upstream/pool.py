"""The connections to one worker."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from urllib.parse import urlsplit

from gateway.upstream.errors import ConnectFailed
from gateway.upstream.protocol import Connection

IDLE_SECONDS = 4.0
"""How long an idle connection is kept: under the 5 s of uvicorn, which serves vLLM."""


class Pool:
    """Keep-alive connections to one worker, the last used first; unbounded by itself.

    Proxy environment variables are not looked at. ``active`` connections carry an exchange.
    """

    def __init__(self, url: str, connect_seconds: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http or https address: {url}")
        self.url = url.rstrip("/")
        self.prefix = parts.path.rstrip("/").encode()
        self.authority = parts.netloc.rpartition("@")[2].encode()
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._connect_seconds = connect_seconds
        self._idle: deque[Connection] = deque()
        self._expiry: asyncio.TimerHandle | None = None
        self.active = 0

    @property
    def idle(self) -> int:
        return len(self._idle)

    def reuse(self) -> Connection | None:
        """An idle connection that is still open, now active; None if there is none."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and not connection.transport.is_closing():
                self.active += 1
                return connection
        return None

    async def connect(self) -> Connection:
        """A fresh connection, active; raises ConnectFailed."""
        loop = asyncio.get_running_loop()
        connection: Connection | None = None
        self.active += 1
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await loop.create_connection(
                    Connection, self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise ConnectFailed(f"no connection within {self._connect_seconds:g} s") from None
        except OSError as error:
            raise ConnectFailed(error.strerror or str(error)) from None
        finally:
            if connection is None:
                self.active -= 1
        sock = connection.transport.get_extra_info("socket")
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def release(self, connection: Connection) -> None:
        """End of an exchange: keep the connection if it can carry another, else close it."""
        self.active -= 1
        if connection.reusable and not connection.closed:
            connection.reusable = False
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
            self._schedule_expiry()
        elif not connection.closed:
            connection.close()

    def close_idle(self) -> None:
        """Close what is idle; active exchanges go on."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        while self._idle:
            self._idle.pop().close()

    def _schedule_expiry(self) -> None:
        if self._expiry is None:
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_at(self._idle[0].idle_since + IDLE_SECONDS, self._expire)

    def _expire(self) -> None:
        """The longest idle are at the left: take from there until one is young enough."""
        self._expiry = None
        limit = asyncio.get_running_loop().time() - IDLE_SECONDS
        while self._idle and (self._idle[0].closed or self._idle[0].idle_since <= limit):
            self._idle.popleft().close()
        if self._idle:
            self._schedule_expiry()
