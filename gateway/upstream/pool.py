"""The connections to one worker."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from gateway.upstream.errors import ConnectFailed
from gateway.upstream.protocol import Connection

IDLE_SECONDS = 4.0
"""How long an idle connection is kept: under the 5 s of uvicorn, which serves vLLM."""


_LOOKS = 4
"""Exchanges in progress are looked at so often per limit, so that one is noticed late by a quarter
of it at most."""


@dataclass(frozen=True, slots=True)
class Limits:
    """``connect_seconds``: to a connection, TLS included; ``head_seconds``: from the request to the
    answer's head; ``idle_seconds``: between two pieces of a body that somebody waits for."""

    connect_seconds: float
    head_seconds: float
    idle_seconds: float


class Pool:
    """Keep-alive connections to one worker, the last used first; unbounded by itself.

    Proxy environment variables are not looked at. ``active`` connections carry an exchange.
    """

    def __init__(self, url: str, limits: Limits) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http or https address: {url}")
        self.url = url.rstrip("/")
        self.prefix = parts.path.rstrip("/").encode()
        self.authority = parts.netloc.rpartition("@")[2].encode()
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.limits = limits
        # Asking asyncio for the running loop is a system call (getpid) up to Python 3.11.
        self._running: asyncio.AbstractEventLoop | None = None
        self._idle: deque[Connection] = deque()
        self._expiry: asyncio.TimerHandle | None = None
        self._watched: dict[Connection, Callable[[float], None]] = {}
        self._watch_seconds = min(limits.head_seconds, limits.idle_seconds) / _LOOKS
        self._watching: asyncio.TimerHandle | None = None
        self.active = 0

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that the pool is used in."""
        if self._running is None:
            self._running = asyncio.get_running_loop()
        return self._running

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
        connection: Connection | None = None
        self.active += 1
        try:
            async with asyncio.timeout(self.limits.connect_seconds):
                _, connection = await self.loop.create_connection(
                    Connection, self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            seconds = self.limits.connect_seconds
            raise ConnectFailed(f"no connection within {seconds:g} s") from None
        except OSError as error:
            raise ConnectFailed(error.strerror or str(error)) from None
        finally:
            if connection is None:
                self.active -= 1
        sock = connection.transport.get_extra_info("socket")
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def watch(self, connection: Connection, look: Callable[[float], None]) -> None:
        """Call ``look`` with the loop's time now and then until the connection is released."""
        self._watched[connection] = look
        if self._watching is None:
            self._watching = self.loop.call_later(self._watch_seconds, self._look)

    def release(self, connection: Connection) -> None:
        """End of an exchange: keep the connection if it can carry another, else close it."""
        self.active -= 1
        self._watched.pop(connection, None)
        if connection.reusable and not connection.closed:
            connection.reusable = False
            connection.idle_since = self.loop.time()
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

    def _look(self) -> None:
        loop = self.loop
        for look in tuple(self._watched.values()):
            look(loop.time())
        again = bool(self._watched)
        self._watching = loop.call_later(self._watch_seconds, self._look) if again else None

    def _schedule_expiry(self) -> None:
        if self._expiry is None:
            self._expiry = self.loop.call_at(self._idle[0].idle_since + IDLE_SECONDS, self._expire)

    def _expire(self) -> None:
        """The longest idle are at the left: take from there until one is young enough."""
        self._expiry = None
        limit = self.loop.time() - IDLE_SECONDS
        while self._idle and (self._idle[0].closed or self._idle[0].idle_since <= limit):
            self._idle.popleft().close()
        if self._idle:
            self._schedule_expiry()
