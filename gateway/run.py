"""The two ways to run: in front of servers that somebody else runs, and with workers of our own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from gateway.config import Settings
from gateway.core.cost import CPU_SPEED, GPU_SPEED, Speed
from gateway.core.reservation import WorkerId
from gateway.prompt.models import Rendering, fetch_tokenizer
from gateway.prompt.tokenizer import TokenizerMissing
from gateway.screen import Screen
from gateway.service import Ending, HttpServer, Service, http_server, listen
from gateway.workers.kv_endpoints import parse_endpoints
from gateway.workers.launch import LaunchPlan
from gateway.workers.probe import Limits
from gateway.workers.prompt_options import prompt_options
from gateway.workers.supervisor import (
    Event,
    OrphansFound,
    Supervisor,
    SupervisorOptions,
    WorkerExited,
    WorkerStarted,
)

log = logging.getLogger(__name__)

_STOP_GRACE_SECONDS = 10.0


async def run_serve(settings: Settings) -> None:
    """In front of the servers at ``settings.worker`` until SIGTERM or SIGINT."""
    sock = listen(settings.host, settings.port)
    rendering = Rendering(await _tokenizer(settings), settings.chat_template)
    limits = Limits(settings.max_num_seqs, settings.max_num_batched_tokens)
    service = Service(settings, rendering, limits, GPU_SPEED, lambda worker_id: None)
    server = http_server(service, settings)
    ending = Ending(lambda: _hurry(server))
    events = settings.worker_kv_events or ["none"] * len(settings.worker)
    for index, (url, endpoints) in enumerate(zip(settings.worker, events, strict=True)):
        service.add_worker(WorkerId(str(index)))
        service.fleet.started(WorkerId(str(index)), url, parse_endpoints(endpoints))
    serving = asyncio.create_task(server.serve([sock]))
    host, port = sock.getsockname()[:2]
    log.info("listening on http://%s:%d for %d workers", host, port, len(settings.worker))
    await _until_end(ending, serving, server)
    await service.close()


async def run_up(settings: Settings, plans: Sequence[LaunchPlan], on_cpu: bool) -> None:
    """With workers of our own, which are gone when this returns."""
    sock = listen(settings.host, settings.port)
    rendering = await _rendering(settings, plans[0])
    host, port = sock.getsockname()[:2]
    screen = Screen(f"http://{host}:{port}", {plan.worker_id: plan.device for plan in plans})
    speed = CPU_SPEED if on_cpu else GPU_SPEED
    upper = _Up(settings, plans, rendering, speed, screen)
    server = http_server(upper.service, settings)
    ending = Ending(lambda: _hurry(server, upper.supervisor.kill_now))
    try:
        await upper.supervisor.start()
        serving = asyncio.create_task(server.serve([sock]))
        await _until_end(ending, serving, server)
        screen.say("stopping the workers")
    finally:
        screen.close()
        await upper.service.close()
        await upper.supervisor.stop(_STOP_GRACE_SECONDS)


class _Up:
    """Ties the supervisor's events to the fleet, and the fleet's word to the supervisor."""

    def __init__(
        self,
        settings: Settings,
        plans: Sequence[LaunchPlan],
        rendering: Rendering,
        speed: Speed,
        screen: Screen,
    ) -> None:
        limits = Limits(plans[0].max_num_seqs, plans[0].max_num_batched_tokens)
        self.service = Service(settings, rendering, limits, speed, self._ready)
        options = SupervisorOptions(
            state_folder=settings.state_dir, start_seconds=settings.start_seconds
        )
        self.supervisor = Supervisor(plans, options, self._event)
        self._screen = screen
        self._generations: dict[str, int] = {}
        for plan in plans:
            self.service.add_worker(WorkerId(plan.worker_id))

    def _event(self, event: Event) -> None:
        service, screen = self.service, self._screen
        match event:
            case WorkerStarted():
                self._generations[event.worker_id] = event.generation
                service.gc_folders[event.worker_id] = event.gc_folder
                service.fleet.started(WorkerId(event.worker_id), event.url, event.events)
                screen.started(event.worker_id, event.pid)
            case WorkerExited():
                service.gc_folders.pop(event.worker_id, None)
                service.fleet.exited(WorkerId(event.worker_id), event.reason)
                screen.exited(event)
            case OrphansFound():
                pids = ", ".join(map(str, event.pids))
                screen.say(f"workers of an earlier run are still there, left alone: pid {pids}")

    def _ready(self, worker_id: WorkerId) -> None:
        self.supervisor.mark_ready(worker_id, self._generations[worker_id])
        models = [str(model.get("id")) for model in self.service.models()]
        self._screen.ready(worker_id, models[0] if models else "")


async def _tokenizer(settings: Settings) -> Path | None:
    """The operator's tokenizer folder; raises TokenizerMissing."""
    if settings.tokenizer is None:
        return None
    return await asyncio.to_thread(fetch_tokenizer, settings.tokenizer)


async def _rendering(settings: Settings, plan: LaunchPlan) -> Rendering:
    """As vLLM's own arguments say, which the workers follow."""
    told = prompt_options(plan.command)
    folder = await _tokenizer(settings)
    if folder is None and told.tokenizer is not None:
        try:
            folder = await asyncio.to_thread(fetch_tokenizer, told.tokenizer)
        except TokenizerMissing as error:
            log.warning("the workers' tokenizer cannot be read here: %s", error)
    return Rendering(folder, told.chat_template, told.defaults, told.drops_tools)


async def _until_end(ending: Ending, serving: asyncio.Task[None], server: HttpServer) -> None:
    """Serve until a signal; then take no more, and let what runs finish within the drain limit."""
    asked = asyncio.create_task(ending.asked.wait())
    await asyncio.wait((asked, serving), return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    server.should_exit = True
    await serving


def _hurry(server: HttpServer, kill: Callable[[], None] | None = None) -> None:
    server.force_exit = True
    if kill is not None:
        kill()
