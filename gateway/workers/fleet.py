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

from gateway.core.router import Router
from gateway.core.worker import Engine, WorkerId
from gateway.workers.probe import Limits, ProbeFailed, WorkerClient
from gateway.workers.scrape import Scrape, parse_scrape

log = logging.getLogger(__name__)

_START_PROBE_SECONDS = 0.25
_MISSED_PROBES = 3


@dataclass(frozen=True, slots=True)
class Hooks:
    """``moved(worker_id, url)``: its address is now this. ``identified(models, client)``: called
    before the worker is opened, with ``data`` of its ``/v1/models``. ``ready(worker_id)``: it is
    open."""

    moved: Callable[[WorkerId, str], None]
    identified: Callable[[list[dict[str, Any]], WorkerClient], Awaitable[None]]
    ready: Callable[[WorkerId], None]


@dataclass(slots=True, eq=False)
class Watched:
    """One worker of the fleet; ``client`` is None until it has an address."""

    id: WorkerId
    client: WorkerClient | None = None
    scrape: Scrape | None = None
    models: list[dict[str, Any]] = field(default_factory=list)
    starts: int = 0
    missed: int = 0
    process_start: float | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Fleet:
    """Owns the watching tasks; tells the router what is ready and what engines there are.

    ``limits`` are the operator's own figures, which go before what ``/server_info`` says.
    """

    def __init__(self, router: Router, hooks: Hooks, limits: Limits, probe_seconds: float) -> None:
        self._router = router
        self._hooks = hooks
        self._limits = limits
        self._probe_seconds = probe_seconds
        self._closing: set[asyncio.Task[None]] = set()
        self.workers: dict[WorkerId, Watched] = {}

    def add(self, worker_id: WorkerId) -> None:
        """A worker that is not running yet."""
        self._router.add_worker(worker_id)
        watched = self.workers[worker_id] = Watched(worker_id)
        watched.task = asyncio.get_running_loop().create_task(self._watch(watched))

    def started(self, worker_id: WorkerId, url: str) -> None:
        """A process of this worker was started and will answer at ``url``."""
        watched = self.workers[worker_id]
        watched.starts += 1
        watched.scrape = watched.process_start = None
        self._router.set_ready(worker_id, False, "starting")
        self._router.new_generation(worker_id, watched.starts)
        old, watched.client = watched.client, WorkerClient(url)
        if old is not None:
            self._later_close(old)
        self._hooks.moved(worker_id, url)
        watched.wake.set()

    def stopped(self, worker_id: WorkerId, reason: str) -> None:
        """The worker's process is gone or cannot be reached: no more requests for it."""
        self.workers[worker_id].scrape = None
        self._router.set_ready(worker_id, False, reason)
        self.workers[worker_id].wake.set()

    def exited(self, worker_id: WorkerId, reason: str) -> None:
        """Its process has ended: there is nobody to probe until the next start."""
        watched = self.workers[worker_id]
        old, watched.client = watched.client, None
        if old is not None:
            self._later_close(old)
        self.stopped(worker_id, reason)

    async def close(self) -> None:
        """End all watching."""
        tasks = [w.task for w in self.workers.values() if w.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._closing, return_exceptions=True)
        for watched in self.workers.values():
            if watched.client is not None:
                await watched.client.close()

    async def _watch(self, watched: Watched) -> None:
        while True:
            client = watched.client
            try:
                if client is not None:
                    await self._look(watched, client)
            except ProbeFailed as error:
                if client is watched.client:
                    self._missed(watched, error)
            except Exception:
                log.exception("watching worker %s failed; it goes on", watched.id)
            await self._pause(watched)

    async def _pause(self, watched: Watched) -> None:
        ready = self._router.workers[watched.id].ready
        seconds = self._probe_seconds if ready else _START_PROBE_SECONDS
        try:
            await asyncio.wait_for(watched.wake.wait(), seconds)
        except TimeoutError:
            pass
        watched.wake.clear()

    async def _look(self, watched: Watched, client: WorkerClient) -> None:
        await client.health()
        if not self._router.workers[watched.id].ready:
            await self._identify(watched, client)
        scrape = await self._scrape(watched, client)
        if watched.client is not client:
            return
        watched.scrape = scrape
        watched.missed = 0
        if not self._router.workers[watched.id].ready:
            self._router.set_ready(watched.id, True)
            log.info("worker %s is ready", watched.id)
            self._hooks.ready(watched.id)

    async def _identify(self, watched: Watched, client: WorkerClient) -> None:
        """What it serves and what its engine is; a restart behind the same address is seen here."""
        models = await client.models()
        scrape = await self._scrape(watched, client)
        limits = await self._engine_limits(client)
        await self._hooks.identified(models, client)
        if watched.client is not client:
            return
        watched.models = models
        if watched.process_start is not None and scrape is not None:
            if scrape.process_start != watched.process_start:
                watched.starts += 1
                self._router.new_generation(watched.id, watched.starts)
        watched.process_start = scrape.process_start if scrape is not None else None
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

    def _later_close(self, client: WorkerClient) -> None:
        task = asyncio.get_running_loop().create_task(client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
