"""vLLM's publisher of KV events, faults included: a PUB socket, a ROUTER socket that replays."""

from __future__ import annotations

import threading
import time
from typing import Any, Literal, Self

import msgspec
import zmq

Event = dict[str, Any]
END = b"\xff" * 8


def stored(
    hashes: list[int] | list[bytes],
    parent: int | bytes | None,
    tokens: list[int],
    size: int,
    **more: Any,
) -> Event:
    """`BlockStored` as vLLM writes it; `more` are its other fields."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def removed(hashes: list[int] | list[bytes], medium: str | None = "GPU", **more: Any) -> Event:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, **more}


CLEARED: Event = {"type": "AllBlocksCleared"}


class EventPublisher:
    """One engine's publisher on loopback, with an engine's life: `restart` is another process at
    the same addresses. `connect_to` makes it connect as vLLM does where the address has no `*`."""

    def __init__(self, connect_to: str | None = None, replay: str | None = None) -> None:
        self._lock = threading.Lock()
        self._connect_to = connect_to
        self.url = connect_to or "tcp://127.0.0.1:*"
        self.replay_url = replay or "tcp://127.0.0.1:*"
        self.losing: Literal["no", "on the way", "for good"] = "no"
        self.mute_replays = False
        self.asked: list[int] = []
        self.next = 0
        self._kept: dict[int, bytes] = {}
        self._ending = threading.Event()

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _open(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.linger = 0
        if self._connect_to:
            self._pub.connect(self._connect_to)
        else:
            self._pub.bind(self.url)
            self.url = self._pub.last_endpoint.decode()
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.bind(self.replay_url)
        self.replay_url = router.last_endpoint.decode()
        self._ending.clear()
        self._thread = threading.Thread(target=self._serve_replays, args=(router,))
        self._thread.start()

    def _close(self) -> None:
        self._ending.set()
        self._thread.join(10)
        self._pub.close()
        self._context.term()  # only now are the addresses free

    def restart(self) -> None:
        """Another engine: numbers begin anew, and nothing of before can be replayed."""
        self._close()
        self.next, self._kept = 0, {}
        self._open()

    def publish(
        self, *events: Any, lost: bool = False, kept: bool = True, raw: bytes | None = None
    ) -> int:
        """One batch and its number; `lost` on its way, and `kept` for a replay."""
        lost |= self.losing != "no"
        kept &= self.losing != "for good"
        batch = raw if raw is not None else msgspec.msgpack.encode([time.time(), list(events), 0])
        with self._lock:
            number, self.next = self.next, self.next + 1
            if kept:
                self._kept[number] = batch
            if not lost:
                self._send(number, batch)
            return number

    def send_again(self, number: int) -> None:
        """A batch that was published before: late, or twice."""
        with self._lock:
            self._send(number, self._kept[number])

    def forget(self, below: int) -> None:
        """Batches up to there are not kept any more."""
        with self._lock:
            self._kept = {n: batch for n, batch in self._kept.items() if n >= below}

    def _send(self, number: int, batch: bytes) -> None:
        self._pub.send_multipart((b"", number.to_bytes(8, "big"), batch))

    def _serve_replays(self, router: zmq.Socket[bytes]) -> None:
        while not self._ending.is_set():
            if not router.poll(20):
                continue
            client, _, start = router.recv_multipart()
            first = int.from_bytes(start, "big")
            self.asked.append(first)
            if self.mute_replays:
                continue
            with self._lock:
                kept = sorted(self._kept.items())
            for number, batch in kept:
                if number >= first:
                    frames = (client, b"", b"", number.to_bytes(8, "big"), batch)
                    router.send_multipart(frames)
            router.send_multipart((client, b"", b"", END, b""))
        router.close()
