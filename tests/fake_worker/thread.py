"""A fake worker in a thread of the test's own process, steered from the test."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any, Self, TypeVar

from tests.fake_worker.connection import Received
from tests.fake_worker.engine import Engine
from tests.fake_worker.kv_events import EventPublisher
from tests.fake_worker.script import Script
from tests.fake_worker.server import FakeServer

T = TypeVar("T")


class FakeWorker:
    """One fake vLLM server on loopback. Every wait is bounded and raises TimeoutError.

    `host` and `tls` may be set until it is entered.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        model: str = "fake-model",
        root: str | None = None,
        max_model_len: int = 32768,
        force_include_usage: bool = True,
    ) -> None:
        self.host = "127.0.0.1"
        self.port = port
        self.tls: ssl.SSLContext | None = None
        self.model = model
        self._something = threading.Condition()
        self._listener: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-worker")
        self.server = FakeServer(
            model,
            root=root,
            max_model_len=max_model_len,
            force_include_usage=force_include_usage,
            changed=self._notify,
        )

    def __enter__(self) -> Self:
        self._thread.start()
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._in_loop(self._end)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"

    @property
    def engine(self) -> Engine:
        return self.server.engine

    def listen(self) -> None:
        """Accept connections, on the port it had before."""

        async def start() -> None:
            self._listener = await self._loop.create_server(
                self.server.connect, self.host, self.port, backlog=4096, ssl=self.tls
            )
            self.port = self._listener.sockets[0].getsockname()[1]

        self._in_loop(start)

    def refuse(self, cut: bool = True) -> None:
        """Close the listening socket, and with `cut` the connections: a worker that died."""

        async def stop() -> None:
            assert self._listener is not None
            self._listener.close()
            self._listener = None
            for connection in self.server.connections:
                if connection.open and cut:
                    connection.reset()

        self._in_loop(stop)

    def tell(self, publisher: EventPublisher) -> None:
        """Let that publisher tell of this worker's cache from now on."""
        self.engine.cache.tell = lambda events: publisher.publish(*events)

    def say(self, **script: Any) -> None:
        """Play this on every request that brings no script of its own."""
        self.server.default = Script(**script)

    def say_once(self, **script: Any) -> None:
        """Play this on one request; repeated calls queue."""
        self.server.once.append(Script(**script))

    def open_gate(self, name: str) -> None:
        async def open_it() -> None:
            self.server.gate(name).set()

        self._in_loop(open_it)

    def set(self, **fields: Any) -> None:
        """Attributes of the server or its engine: health, mute, tokenize, metric_names, ..."""
        for name, value in fields.items():
            owner = self.server if hasattr(self.server, name) else self.engine
            if not hasattr(owner, name):
                raise AttributeError(name)
            setattr(owner, name, value)

    def reset(self) -> None:
        """Forget scripts and what was received; listen again if it refused."""

        async def forget() -> None:
            self.server.reset()

        self._in_loop(forget)
        if self._listener is None:
            self.listen()

    @property
    def inference(self) -> list[Received]:
        """Requests to the inference endpoints, in order of arrival."""
        return [r for r in list(self.server.received) if r.is_inference]

    def wait(self, what: str, condition: Callable[[], T], seconds: float = 5) -> T:
        """The first true value of `condition`, looked at whenever something happens here."""
        with self._something:
            deadline = time.monotonic() + seconds
            while not (value := condition()):
                left = deadline - time.monotonic()
                if left <= 0 or not self._something.wait(left):
                    if value := condition():
                        return value
                    raise TimeoutError(f"fake worker {self.port}: {what} within {seconds} s")
            return value

    def wait_inference(self, count: int = 1, seconds: float = 5) -> list[Received]:
        self.wait(f"{count} requests", lambda: len(self.inference) >= count, seconds)
        return self.inference

    def wait_peer_closed(self, received: Received, seconds: float = 5) -> float:
        """When the peer closed on this request, as time.monotonic()."""
        self.wait("the peer closes", lambda: received.peer_closed_at is not None, seconds)
        assert received.peer_closed_at is not None
        return received.peer_closed_at

    def _notify(self) -> None:
        with self._something:
            self._something.notify_all()

    async def _end(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for connection in self.server.connections:
            if connection.open:
                connection.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _in_loop(self, what: Callable[[], Any]) -> None:
        asyncio.run_coroutine_threadsafe(what(), self._loop).result(10)
