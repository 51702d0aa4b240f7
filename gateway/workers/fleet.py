"""The workers as they are: one task each that probes, identifies and scrapes.

A worker is opened to traffic when ``/health`` answers 200 and it has said what it serves, and
closed when it cannot be reached or misses several probes. Its generation changes when its process
was started anew: what its cache held is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from gateway.core.reservation import WorkerId
from gateway.core.router import Router
from gateway.core.worker import Engine, Loss
from gateway.workers.kv_endpoints import EventEndpoints
from gateway.workers.kv_events import Heard, follow
from gateway.workers.probe import Limits, ProbeFailed, WorkerClient
from gateway.workers.scrape import Scrape, parse_scrape

log = logging.getLogger(__name__)

_START_PROBE_SECONDS = 0.25
_MISSED_PROBES = 3
_ASLEEP = "asleep"


@dataclass(frozen=True, slots=True)
class Hooks:
    """``moved(worker_id, url)``: its address is now this. ``identified(models, client)``: called
    before the worker is opened, with ``data`` of its ``/v1/models``. ``ready(worker_id)``: it is
    open."""

    moved: Callable[[WorkerId, str], None]
    identified: Callable[[list[dict[str, Any]], WorkerClient], Awaitable[None]]
    ready: Callable[[WorkerId], None]


@dataclass(frozen=True, slots=True)
class Every:
    """Seconds between two looks at a worker, and between two scrapes of its metrics."""

    probe_seconds: float
    scrape_seconds: float


@dataclass(slots=True, eq=False)
class Watched:
    """One worker of the fleet; ``task`` watches its present process, over ``client``, and
    ``following`` follows its events."""

    id: WorkerId
    scrape: Scrape | None = None
    models: list[dict[str, Any]] = field(default_factory=list)
    starts: int = 0
    missed: int = 0
    process_start: float | None = None
    scraped_at: float = 0.0
    answers: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    client: WorkerClient | None = None
    endpoints: EventEndpoints | None = None
    heard: Heard = field(default_factory=Heard)
    following: asyncio.Task[None] | None = None


class Fleet:
    """Owns the watching tasks; tells the router what is ready and what engines there are.

    Each start of a worker is watched by a task of its own, which owns its connections: it is
    cancelled when that process is known to be gone, so that nothing of an old process is believed
    of a new one. ``limits`` are the operator's own figures, which go before what ``/server_info``
    says.
    """

    def __init__(self, router: Router, hooks: Hooks, limits: Limits, every: Every) -> None:
        self._router = router
        self._hooks = hooks
        self._limits = limits
        self._every = every
        self._ending: set[asyncio.Task[None]] = set()
        self.workers: dict[WorkerId, Watched] = {}

    def add(self, worker_id: WorkerId) -> None:
        """A worker that is not running yet."""
        self._router.add_worker(worker_id)
        self.workers[worker_id] = Watched(worker_id)

    def started(
        self, worker_id: WorkerId, url: str, endpoints: EventEndpoints | None = None
    ) -> None:
        """A process of this worker was started and will answer at ``url``, and tell at
        ``endpoints`` what its engine caches."""
        watched = self.workers[worker_id]
        self._end(watched)
        watched.endpoints = endpoints
        watched.scrape = watched.process_start = None
        watched.missed = 0
        self._router.set_ready(worker_id, False, "starting")
        self._restarted(watched)
        self._hooks.moved(worker_id, url)
        watched.task = asyncio.get_running_loop().create_task(self._watch(watched, url))

    def stopped(self, worker_id: WorkerId, reason: str) -> None:
        """The worker cannot be reached: no more requests for it until it answers again."""
        watched = self.workers[worker_id]
        watched.scrape = None
        self._router.set_ready(worker_id, False, reason)
        watched.wake.set()

    def exited(self, worker_id: WorkerId, reason: str) -> None:
        """Its process has ended: there is nobody to watch until the next start."""
        self._end(self.workers[worker_id])
        self.stopped(worker_id, reason)

    async def reset_caches(self) -> dict[WorkerId, str]:
        """Empty each worker's prefix cache; of each ``reset``, or why not."""
        told = await asyncio.gather(*map(self._reset_cache, self.workers.values()))
        return dict(zip(self.workers, told, strict=True))

    async def _reset_cache(self, watched: Watched) -> str:
        worker = self._router.workers[watched.id]
        if watched.client is None or not worker.available:
            return worker.reason or "not available"
        try:
            done = await watched.client.reset_prefix_cache()
        except ProbeFailed as error:
            return str(error)
        if not done:
            return "blocks are in use by running requests"
        self._router.new_generation(watched.id, Loss.RESET)
        return "reset"

    async def close(self) -> None:
        """End all watching."""
        for watched in self.workers.values():
            self._end(watched)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _end(self, watched: Watched) -> None:
        self._cancel(watched.task)
        self._unfollow(watched)

    def _cancel(self, task: asyncio.Task[None] | None) -> None:
        if task is not None and not task.done():
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _unfollow(self, watched: Watched) -> None:
        self._cancel(watched.following)
        self._router.caches.followed[watched.id].ended()

    def _restarted(self, watched: Watched) -> None:
        watched.starts += 1
        self._unfollow(watched)
        self._router.new_generation(watched.id, Loss.STARTED)
        if watched.endpoints is not None:
            events = follow(self._router.caches, watched.id, watched.endpoints, watched.heard)
            watched.following = asyncio.get_running_loop().create_task(events)

    async def _watch(self, watched: Watched, url: str) -> None:
        client = watched.client = WorkerClient(url)
        try:
            while True:
                try:
                    await self._look(watched, client)
                except ProbeFailed as error:
                    self._missed(watched, error)
                except Exception:
                    log.exception("watching worker %s failed; it goes on", watched.id)
                await self._pause(watched)
        finally:
            if watched.client is client:
                watched.client = None
            await client.close()

    async def _pause(self, watched: Watched) -> None:
        ready = self._router.workers[watched.id].ready
        try:
            async with asyncio.timeout(
                self._every.probe_seconds if ready else _START_PROBE_SECONDS
            ):
                await watched.wake.wait()
        except TimeoutError:
            pass
        watched.wake.clear()

    async def _look(self, watched: Watched, client: WorkerClient) -> None:
        worker = self._router.workers[watched.id]
        if not worker.ready or worker.answers == watched.answers:
            await client.health()
        # Whole answers since the last look say as much as a probe would, and cost nothing.
        watched.answers = worker.answers
        now = asyncio.get_running_loop().time()
        if not worker.ready or now - watched.scraped_at >= self._every.scrape_seconds:
            watched.scraped_at = now
            scrape = await self._scrape(watched, client)
            self._note_process(watched, scrape)
            if scrape is not None and scrape.asleep:
                self._asleep(watched)
                return
            if not worker.ready:
                await self._identify(watched, client, scrape)
            watched.scrape = scrape
        watched.missed = 0
        if not worker.ready:
            self._router.set_ready(watched.id, True)
            log.info("worker %s is ready", watched.id)
            self._hooks.ready(watched.id)

    def _note_process(self, watched: Watched, scrape: Scrape | None) -> None:
        """A restart behind the same address shows in the start time of the process."""
        start = scrape.process_start if scrape is not None else None
        if start is None:
            return
        if watched.process_start is not None and start != watched.process_start:
            log.warning("worker %s was restarted: its cache is taken as empty", watched.id)
            self._restarted(watched)
        watched.process_start = start

    def _asleep(self, watched: Watched) -> None:
        """An engine that sleeps has discarded its cache, though ``/health`` still answers 200."""
        worker = self._router.workers[watched.id]
        if worker.reason != _ASLEEP:
            log.warning("worker %s sleeps: its cache is taken as empty", watched.id)
            self._router.new_generation(watched.id, Loss.SLEPT)
            self.stopped(watched.id, _ASLEEP)

    async def _identify(
        self, watched: Watched, client: WorkerClient, scrape: Scrape | None
    ) -> None:
        """What it serves, and what its engine is."""
        models = await client.models()
        limits = await self._engine_limits(client)
        await self._hooks.identified(models, client)
        if watched.task is not asyncio.current_task():
            # The process was replaced meanwhile; the cancellation arrives at the next await.
            await asyncio.sleep(0)
        watched.models = models
        names = frozenset(str(model.get("id")) for model in models)
        self._router.set_models(watched.id, names)
        block_size = (scrape and scrape.block_size) or Engine().block_size
        blocks = scrape.num_blocks if scrape is not None else None
        engine = Engine(block_size, blocks, limits.max_num_seqs, limits.max_num_batched_tokens)
        self._router.set_engine(watched.id, engine)

    async def _engine_limits(self, client: WorkerClient) -> Limits:
        ours = self._limits
        if ours.max_num_seqs is not None and ours.max_num_batched_tokens is not None:
            return ours
        try:
            told = await client.limits()
        except ProbeFailed:
            return ours
        return Limits(
            ours.max_num_seqs or told.max_num_seqs,
            ours.max_num_batched_tokens or told.max_num_batched_tokens,
        )

    async def _scrape(self, watched: Watched, client: WorkerClient) -> Scrape | None:
        try:
            return parse_scrape(await client.metrics(), watched.scrape)
        except (ProbeFailed, ValueError) as error:
            log.debug("worker %s cannot be scraped: %s", watched.id, error)
            return None

    def _missed(self, watched: Watched, error: ProbeFailed) -> None:
        worker = self._router.workers[watched.id]
        watched.missed += 1
        if not worker.ready:
            worker.reason = str(error)
        elif error.unreachable or watched.missed >= _MISSED_PROBES:
            log.warning("worker %s is not ready any more: %s", watched.id, error)
            self.stopped(watched.id, str(error))
