"""Many streams at once, each event's arrival against the time that it was due at the stub worker.

    python -m tests.bench.stream_client --ports 9100 9101 --streams 1000 [--each 1] ...

Every connection carries `--each` streams, one after the other; the first ones start evenly over
`--spread-seconds`. The report is JSON on stdout, times in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from dataclasses import dataclass, field
from typing import cast

import httptools
import uvloop

from tests.bench.figures import percentile
from tests.bench.stub_worker import DUE_DIGITS, DUE_MARK

NS_PER_MS = 1_000_000
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)


@dataclass
class Found:
    """`whole`: streams that ended properly with every event; all others are `broken`."""

    whole: int = 0
    broken: int = 0
    lateness_ms: list[float] = field(default_factory=list)
    first_byte_ms: list[float] = field(default_factory=list)

    def report(self) -> dict[str, object]:
        return {
            "whole": self.whole,
            "broken": self.broken,
            "lateness_ms": _percentiles(self.lateness_ms),
            "first_byte_ms": _percentiles(self.first_byte_ms),
        }


class Streams(asyncio.Protocol):
    """One connection with its streams, one after the other; `done` when there are no more."""

    def __init__(self, number: int, each: int, chunks: int, found: Found) -> None:
        self._number = number
        self._left = each
        self._chunks = chunks
        self._found = found
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._found.broken += self._left
        self._left = 0
        if not self.done.done():
            self.done.set_result(None)

    def ask(self) -> None:
        """The next stream, with a prompt that shares its beginning with no other."""
        if self._transport.is_closing():
            return
        text = f"{self._number} {self._left} " * 200
        message = {"role": "user", "content": text}
        body = json.dumps({"model": "m", "messages": [message], "stream": True}).encode()
        self._rest = b""
        self._events = 0
        self._closed = False
        self._first_ns = 0
        self._asked_ns = time.monotonic_ns()
        self._transport.write(HEAD % len(body) + body)

    def data_received(self, data: bytes) -> None:
        self._now_ns = time.monotonic_ns()
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self._first_ns = self._first_ns or self._now_ns
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            at = event.find(DUE_MARK) + len(DUE_MARK)
            if at >= len(DUE_MARK):
                self._events += 1
                late_ns = self._now_ns - int(event[at : at + DUE_DIGITS])
                self._found.lateness_ms.append(late_ns / NS_PER_MS)
            elif event == b"data: [DONE]":
                self._closed = True

    def on_message_complete(self) -> None:
        whole = self._closed and self._events == self._chunks
        self._found.whole += whole
        self._found.broken += not whole
        if self._first_ns:
            self._found.first_byte_ms.append((self._first_ns - self._asked_ns) / NS_PER_MS)
        self._left -= 1
        if self._left and self._parser.should_keep_alive():
            self._parser = httptools.HttpResponseParser(self)
            self.ask()
        else:
            self._transport.close()


async def load(asked: argparse.Namespace) -> Found:
    """All streams, for at most `--limit-seconds`: what is not whole by then is broken."""
    loop = asyncio.get_running_loop()
    found = Found()
    connections = []
    for number in range(asked.streams):
        port = asked.ports[number % len(asked.ports)]
        _, connection = await loop.create_connection(
            lambda number=number: Streams(number, asked.each, asked.chunks, found),  # type: ignore[misc]
            "127.0.0.1",
            port,
        )
        connections.append(connection)
    for number, connection in enumerate(connections):
        loop.call_later(asked.spread_seconds * number / asked.streams, connection.ask)
    await asyncio.wait([c.done for c in connections], timeout=asked.limit_seconds)
    found.broken = asked.streams * asked.each - found.whole
    return found


def _percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{p}": round(percentile(values, p), 3) for p in (50, 99, 100)} if values else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ports", type=int, nargs="+", required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--each", type=int, default=1)
    parser.add_argument("--chunks", type=int, required=True)
    parser.add_argument("--spread-seconds", type=float, default=0)
    parser.add_argument("--limit-seconds", type=float, default=60)
    asked = parser.parse_args()
    gc.disable()  # a collection would look like lateness; the run is short and bounded
    print(json.dumps(uvloop.run(load(asked)).report()))


if __name__ == "__main__":
    main()
