"""Requests whose client leaves at a random moment: before the head, between events, at the end.

    python -m tests.bench.cancelling_client --port 8000 [--requests 10000] [--at-once 100] ...

Half of them are streams; half leave with FIN, half with RST. The report is JSON on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from typing import cast

import httptools
import uvloop

RESET_ON_CLOSE = struct.pack("ii", 1, 0)
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)


class Request(asyncio.Protocol):
    """One request on a connection of its own; `ended` says how it went.

    `cancelled`: left as intended; `answered`: the whole answer was quicker; `failed`: the gateway
    closed first, or answered with an error.
    """

    def __init__(self, body: bytes, stay_seconds: float, by_reset: bool) -> None:
        self._body = body
        self._stay_seconds = stay_seconds
        self._by_reset = by_reset
        self._parser = httptools.HttpResponseParser(self)
        self._how = "failed"
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(HEAD % len(self._body) + self._body)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._stay_seconds, self._leave, "cancelled")

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self.ended.set_result(self._how)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._leave("answered" if self._parser.get_status_code() == 200 else "failed")

    def _leave(self, how: str) -> None:
        if self._transport.is_closing():
            return
        self._how = how
        if self._by_reset:
            handle: socket.socket = self._transport.get_extra_info("socket")
            handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self._transport.abort()


async def _one_after_another(
    port: int, numbers: Iterator[int], longest_seconds: float, rng: random.Random
) -> Counter[str]:
    loop = asyncio.get_running_loop()
    counted: Counter[str] = Counter()
    for number in numbers:
        message = {"role": "user", "content": f"{number} " * 200}
        body = {"model": "m", "messages": [message], "stream": rng.random() < 0.5}
        request = Request(
            json.dumps(body).encode(), rng.uniform(0, longest_seconds), rng.random() < 0.5
        )
        try:
            await loop.create_connection(lambda request=request: request, "127.0.0.1", port)  # type: ignore[misc]
        except OSError:
            counted["failed"] += 1
        else:
            counted[await request.ended] += 1
    return counted


async def load(asked: argparse.Namespace) -> Counter[str]:
    rng = random.Random(asked.seed)
    numbers = iter(range(asked.requests))  # shared: each is taken once
    turns = [
        _one_after_another(asked.port, numbers, asked.longest_seconds, rng)
        for _ in range(asked.at_once)
    ]
    async with asyncio.timeout(asked.limit_seconds):
        return sum(await asyncio.gather(*turns), Counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=100)
    parser.add_argument("--longest-seconds", type=float, required=True)
    parser.add_argument("--limit-seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=1)
    print(json.dumps(uvloop.run(load(parser.parse_args()))))


if __name__ == "__main__":
    main()
