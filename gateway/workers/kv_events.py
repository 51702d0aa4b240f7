"""Follows the KV events that one worker's engine publishes over ZeroMQ.

Each message has three frames: topic, an 8-byte big-endian number, a batch. Another socket replays:
asked for a number it sends all batches from there on that are still kept, and -1 as the last
number. What is decoded and applied at a stretch is bounded in time: the loop has streams to serve.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic, time

import zmq

from gateway.core.caches import Caches
from gateway.core.engine_cache import BlocksStored, Event
from gateway.core.event_order import Batch, EventOrder, Step
from gateway.core.reservation import WorkerId
from gateway.workers.kv_endpoints import EventEndpoints
from gateway.workers.kv_wire import Undecodable, decode

log = logging.getLogger(__name__)

_PIECE_BLOCKS = 256
_STRETCH_SECONDS = 0.002
_REPLAY_SECONDS = 2.0
"""A replay of which nothing has come for so long is given up, if batches wait for it."""

_MOST_QUEUED = 100_000
_HEARTBEAT_MILLISECONDS = 5_000
_RECONNECT_MILLISECONDS = 100
_END = (1 << 64) - 1


@dataclass(slots=True)
class Heard:
    """Counts of one worker's events, over all its starts; seconds from a step of the engine to its
    batch being here."""

    events: int = 0
    gaps: int = 0
    replays: int = 0
    undecodable: int = 0
    lag_seconds: float | None = None


async def follow(
    caches: Caches, worker_id: WorkerId, endpoints: EventEndpoints, heard: Heard
) -> None:
    """Until cancelled. The caller ends the trust in what was followed (``Followed.ended``)."""
    following = _Following(caches, worker_id, endpoints, heard)
    try:
        await following.run()
    except Exception:
        log.exception("events of worker %s are followed no more", worker_id)
        caches.followed[worker_id].ended()
    finally:
        following.close()


class _Following:
    def __init__(
        self, caches: Caches, worker_id: WorkerId, endpoints: EventEndpoints, heard: Heard
    ) -> None:
        self._caches = caches
        self._followed = caches.followed[worker_id]
        self._worker_id = worker_id
        self._heard = heard
        self._order = EventOrder(endpoints.replay is not None)
        self._ready = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._stretch_began = monotonic()
        self._endpoints = endpoints
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._live = context.socket(zmq.SUB)
        self._replay = context.socket(zmq.DEALER) if endpoints.replay is not None else None

    def _open(self) -> None:
        """Raises zmq.ZMQError where an address cannot be used."""
        endpoints = self._endpoints
        for socket in (self._live, self._replay):
            if socket is None:
                continue
            socket.linger = 0
            socket.rcvhwm = _MOST_QUEUED
            socket.heartbeat_ivl = _HEARTBEAT_MILLISECONDS
            socket.reconnect_ivl = _RECONNECT_MILLISECONDS
        self._live.subscribe(b"")
        if endpoints.bound:
            self._live.bind(endpoints.live)
        else:
            self._live.connect(endpoints.live)
        if self._replay is not None and endpoints.replay is not None:
            self._replay.connect(endpoints.replay)

    def close(self) -> None:
        for socket in (self._live, self._replay):
            if socket is not None and not socket.closed:
                self._loop.remove_reader(socket.fileno())
                socket.close()

    async def run(self) -> None:
        self._open()
        for socket in (self._live, self._replay):
            if socket is not None:
                # It becomes readable when something changed, and says no second time that there is
                # more: each wait comes after both sockets were found empty.
                self._loop.add_reader(socket.fileno(), self._ready.set)
        await self._do(self._order.join())
        while True:
            self._ready.clear()
            if (replayed := _receive(self._replay)) is not None:
                await self._do(self._replayed(replayed))
            elif (live := _receive(self._live)) is not None:
                await self._do(self._published(live))
            else:
                await self._wait()
            await self._breathe()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(_REPLAY_SECONDS if self._order.behind else None):
                await self._ready.wait()
        except TimeoutError:
            await self._do(self._order.replay_ended())
        self._stretch_began = monotonic()

    def _published(self, frames: Sequence[bytes]) -> list[Batch | Step]:
        batch = self._decoded(frames)
        if batch is None:
            return []
        self._heard.lag_seconds = max(0.0, time() - batch.at)
        before = self._order.gaps
        steps = self._order.live(batch)
        self._heard.gaps += self._order.gaps - before
        return steps

    def _replayed(self, frames: Sequence[bytes]) -> list[Batch | Step]:
        if int.from_bytes(frames[-2], "big") == _END:
            return self._order.replay_ended()
        batch = self._decoded(frames)
        return [] if batch is None else self._order.replayed(batch)

    def _decoded(self, frames: Sequence[bytes]) -> Batch | None:
        """A batch that cannot be read is as good as one that never came: the next shows a gap."""
        try:
            return decode(int.from_bytes(frames[-2], "big"), frames[-1])
        except Undecodable as error:
            self._heard.undecodable += 1
            log.debug("a batch of worker %s cannot be read: %s", self._worker_id, error)
            return None

    async def _do(self, steps: Sequence[Batch | Step]) -> None:
        for step in steps:
            match step:
                case Batch():
                    for event in step.events:
                        await self._apply(event)
                    self._followed.applied()
                    self._heard.events += len(step.events)
                case Step.ASK:
                    self._heard.replays += 1
                    self._ask()
                case Step.LOST:
                    log.warning(
                        "events of worker %s are missing: its cache is estimated until it is known"
                        " again",
                        self._worker_id,
                    )
                    self._followed.lost()
                case Step.RESTARTED:
                    self._followed.began()
                case Step.COMPLETE:
                    self._followed.alive = True

    async def _apply(self, event: Event) -> None:
        if isinstance(event, BlocksStored):
            for piece in event.pieces(_PIECE_BLOCKS):
                self._caches.apply(self._worker_id, piece)
                await self._breathe()
        else:
            self._caches.apply(self._worker_id, event)

    async def _breathe(self) -> None:
        if monotonic() - self._stretch_began > _STRETCH_SECONDS:
            await asyncio.sleep(0)
            self._stretch_began = monotonic()

    def _ask(self) -> None:
        assert self._replay is not None
        self._replay.send_multipart((b"", self._order.ask_from.to_bytes(8, "big")), zmq.NOBLOCK)


def _receive(socket: zmq.Socket[bytes] | None) -> Sequence[bytes] | None:
    """A whole message of two frames at least, or None if there is none now."""
    while socket is not None:
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        if len(frames) >= 2 and len(frames[-2]) == 8:
            return frames
    return None
