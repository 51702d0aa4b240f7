"""The composition root: puts the parts together and runs them from start to drained end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn

from gateway.api.app import build_app
from gateway.api.client import ClientProtocol
from gateway.api.deps import Deps
from gateway.api.pace import Pace
from gateway.config import Settings
from gateway.core.baselines import BASELINES
from gateway.core.cost import Speed
from gateway.core.options import Options
from gateway.core.placement import POLICIES
from gateway.core.reservation import WorkerId
from gateway.core.router import Router
from gateway.observe.cache_view import CacheViewCollector, EventFigures
from gateway.observe.gc_pauses import GcPauseCollector, OwnPauses, freeze_heap
from gateway.observe.journal import Journal
from gateway.observe.metrics import Metrics
from gateway.observe.request_log import RequestLog
from gateway.observe.state import EngineFigures, Sources, StateCollector
from gateway.prompt.models import Rendering, TokenizerSource
from gateway.prompt.reader import Prompts
from gateway.prompt.sample import Sampler
from gateway.prompt.verify import Tokenize
from gateway.upstream.pool import Limits as PoolLimits
from gateway.upstream.pool import Pool
from gateway.workers.fleet import Every, Fleet, Hooks
from gateway.workers.probe import Limits, ProbeFailed, WorkerClient

log = logging.getLogger(__name__)


_YOUNG_OBJECTS = 10_000
"""New objects between young collections, 700 by default: nearly all of a request's are gone by
their reference counts before, and each collection costs the hot path a few per cent."""


class Service:
    """One gateway: router, fleet, application. Must be made inside a running event loop."""

    def __init__(
        self,
        settings: Settings,
        rendering: Rendering,
        limits: Limits,
        speed: Speed,
        on_ready: Callable[[WorkerId], None],
    ) -> None:
        self._settings = settings
        self._on_ready = on_ready
        self._warm = False
        # What the imports left is frozen before pauses are recorded: nobody is served yet.
        freeze_heap()
        gc.set_threshold(_YOUNG_OBJECTS, 10, 10)
        self._own_pauses = OwnPauses()
        self.pools: dict[WorkerId, Pool] = {}
        self._limits = PoolLimits(
            settings.connect_seconds, settings.head_seconds, settings.idle_seconds
        )
        self.gc_folders: dict[str, Path] = {}
        self.router = Router(_options(settings, speed))
        self.metrics = Metrics(settings.shadow_policy)
        self._journal = Journal(
            sys.stderr if settings.log_level in ("debug", "info") else None,
            RequestLog(settings.request_log) if settings.request_log is not None else None,
        )
        self.prompts = Prompts()
        self.source = TokenizerSource(self.prompts, rendering)
        sampler = Sampler(self.prompts, self._tokenize_of, settings.token_check_seconds)
        self._sampling = asyncio.get_running_loop().create_task(sampler.run())
        hooks = Hooks(self._moved, self._identified, self._ready)
        self.fleet = Fleet(
            self.router, hooks, limits, Every(settings.probe_seconds, settings.scrape_seconds)
        )
        self.metrics.registry.register(StateCollector(self._sources()))
        self.metrics.registry.register(CacheViewCollector(self.router, self._heard))
        self.metrics.registry.register(GcPauseCollector(lambda: self.gc_folders, self._own_pauses))
        self.app = build_app(self._deps(settings), self.models)

    def _deps(self, settings: Settings) -> Deps:
        return Deps(
            self.router,
            self.pools,
            self.prompts,
            self.metrics,
            self._journal,
            settings.max_body_bytes,
            settings.heartbeat_seconds,
            lambda worker_id, why: self.fleet.stopped(worker_id, why),
            _request_ids(),
            self.fleet.reset_caches if settings.admin_endpoints else None,
        )

    def add_worker(self, worker_id: WorkerId) -> None:
        self.fleet.add(worker_id)
        self.metrics.worker_added(worker_id)

    def models(self) -> list[dict[str, Any]]:
        """Models of the ready workers; of several with one id the one that takes the least."""
        found: dict[str, dict[str, Any]] = {}
        for worker_id, watched in self.fleet.workers.items():
            if not self.router.workers[worker_id].available:
                continue
            for model in watched.models:
                known = found.get(str(model.get("id")))
                if known is None or _max_len(model) < _max_len(known):
                    found[str(model.get("id"))] = model
        return list(found.values())

    async def close(self) -> None:
        self._sampling.cancel()
        await self.fleet.close()
        for pool in self.pools.values():
            pool.close_idle()
        self._journal.close()
        self.prompts.close()
        self._own_pauses.close()

    def _moved(self, worker_id: WorkerId, url: str) -> None:
        old = self.pools.get(worker_id)
        if old is not None:
            old.close_idle()
        self.pools[worker_id] = Pool(url, self._limits)

    async def _identified(self, models: list[dict[str, Any]], client: WorkerClient) -> None:
        await self.source.prepare(models, client.tokenize)

    def _tokenize_of(self, model: str) -> Tokenize | None:
        """`/tokenize` of any ready worker that has the model: each has its turn now and then."""
        clients = [
            watched.client
            for worker_id, watched in self.fleet.workers.items()
            if (worker := self.router.workers[worker_id]).available and model in worker.models
        ]
        client = random.choice(clients) if clients else None
        return None if client is None else partial(_ids_or_none, client)

    def _ready(self, worker_id: WorkerId) -> None:
        if not self._warm:
            self._warm = True
            log.debug("heap frozen: %d objects", freeze_heap())
        self._on_ready(worker_id)

    def _sources(self) -> Sources:
        return Sources(
            router=self.router,
            engines=self._engines,
            connections=lambda: {w: (p.active, p.idle) for w, p in self.pools.items()},
            starts=lambda: {w: watched.starts for w, watched in self.fleet.workers.items()},
            prompt_modes=self.source.modes,
            token_mismatches=self.source.mismatches,
            cache_ratio=self.metrics.cache_ratio,
        )

    def _heard(self) -> Mapping[WorkerId, EventFigures]:
        return {
            worker_id: EventFigures(
                heard.events, heard.gaps, heard.replays, heard.undecodable, heard.lag_seconds
            )
            for worker_id, watched in self.fleet.workers.items()
            if watched.endpoints is not None and (heard := watched.heard)
        }

    def _engines(self) -> Mapping[str, EngineFigures]:
        return {
            worker_id: EngineFigures(
                s.running, s.waiting, s.kv_usage_ratio, s.tokens_per_step,
                s.prefix_queries, s.prefix_hits, s.preemptions,
            )
            for worker_id, watched in self.fleet.workers.items()
            if (s := watched.scrape) is not None
        }  # fmt: skip


async def _ids_or_none(client: WorkerClient, body: dict[str, Any]) -> list[int] | None:
    """No ids where the worker does not answer."""
    try:
        return await client.tokenize(body)
    except ProbeFailed as error:
        log.debug("no token ids to compare with: %s", error)
        return None


def _options(settings: Settings, speed: Speed) -> Options:
    return Options(
        policy=POLICIES[settings.policy],
        shadow=(BASELINES | POLICIES)[settings.shadow_policy] if settings.shadow_policy else None,
        social_weight=settings.social_weight,
        max_index_blocks=settings.max_index_blocks,
        speed=speed,
    )


def _request_ids() -> Callable[[], bytes]:
    """Ids that no other request has: 8 random bytes of this process and a count."""
    start = os.urandom(8).hex().encode()
    numbers = itertools.count(1)
    return lambda: b"%b-%x" % (start, next(numbers))


def _max_len(model: dict[str, Any]) -> float:
    value = model.get("max_model_len")
    return float(value) if isinstance(value, int) else float("inf")


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the composition root has its own order of ending."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(service: Service, settings: Settings) -> HttpServer:
    return HttpServer(
        uvicorn.Config(
            service.app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            http=cast(type[asyncio.Protocol], partial(ClientProtocol, Pace())),
            proxy_headers=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(settings.drain_seconds) or 1,
        )
    )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=2048)
    # Accepted sockets inherit it; asyncio's own loop would not set it on them.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class Ending:
    """The first SIGTERM or SIGINT asks for the end, the second for the end at once."""

    def __init__(self, hurry: Callable[[], None]) -> None:
        self.asked = asyncio.Event()
        self._hurry = hurry
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        if self.asked.is_set():
            self._hurry()
        self.asked.set()
