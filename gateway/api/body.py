"""Request bodies: read whole, under a limit, with an eye on the client."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive, Scope

from gateway.api import errors
from gateway.api.client import ClientProtocol


class ClientGone(Exception):
    """The client closed its connection before its answer was complete."""


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """The whole body; raises ApiError (413) over the limit, before reading where it is announced,
    and ClientGone."""
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > limit_bytes:
            raise errors.body_too_large(limit_bytes)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit_bytes:
            raise errors.body_too_large(limit_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def discard_body(receive: Receive, seconds: float, silent_seconds: float) -> None:
    """Read what is left of a body, for so long and while it comes: closing on unread bytes resets
    the connection, and the client would never see its answer."""
    try:
        async with asyncio.timeout(seconds):
            more = True
            while more:
                async with asyncio.timeout(silent_seconds):
                    message = await receive()
                more = message["type"] != "http.disconnect" and message.get("more_body", False)
    except TimeoutError:
        pass


class ClientWatch:
    """Turns "the client has left" into ClientGone at whatever the request's task awaits.

    An async context manager for the time after the body has been read, built as ``asyncio.timeout``
    is: who notices that the client is gone cancels the task. That is the connection itself where
    it tells, else a second task that waits for ASGI's message.
    """

    def __init__(self, receive: Receive, client: ClientProtocol | None) -> None:
        self._receive = receive
        self._client = client
        self._gone = False
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ClientWatch:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a client is watched from inside a task")
        self._task = task
        self._cancelling = task.cancelling()
        if self._client is None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())
        elif self._client.lost:
            raise ClientGone
        else:
            self._client.gone = self._left
            # Large bodies pause reading until ASGI's next receive, which is not called any more.
            self._client.flow.resume_reading()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if self._gone and self._task.uncancel() <= self._cancelling:
            if kind is asyncio.CancelledError:
                raise ClientGone from error

    def stop(self) -> None:
        """The answer is about to be complete: what comes now is not the client leaving early."""
        if self._watcher is not None:
            self._watcher.cancel()
        elif self._client is not None:
            self._client.gone = None

    def _left(self) -> None:
        self._gone = True
        self._task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left()
