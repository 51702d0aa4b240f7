"""Keeps the workers' processes running: starts them, sees them end, starts them again.

Each start of a worker is a generation. Nothing of one generation is left when the next begins, and
nothing of any when `stop` returns or the gateway dies. Workers do not affect each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gateway.workers.guarded import Command, GuardedProcess, StartFailed, WorkerLog, orphans
from gateway.workers.kv_endpoints import EventEndpoints, HeldEndpoints
from gateway.workers.launch import LaunchPlan
from gateway.workers.ports import LOOPBACK, HeldPort

GC_FOLDER_VARIABLE = "GATEWAY_GC_DIR"

logger = logging.getLogger(__name__)


class StateFolderInUse(Exception):
    """Another gateway is using the state folder."""


@dataclass(frozen=True, slots=True)
class SupervisorOptions:
    """Where the workers' files are, and the limits of supervision."""

    state_folder: Path
    start_seconds: float = 1800  # to become ready in; then the worker is ended and started again
    grace_seconds: float = 10  # from SIGTERM to SIGKILL
    # The same where nobody is served: the worker is loading (when vLLM does not heed SIGTERM), or
    # its API server is dead (when the rest takes whatever time it is given), or the gateway is.
    unserved_grace_seconds: float = 2
    first_pause_seconds: float = 1  # before a restart; doubled for each further one
    longest_pause_seconds: float = 60
    settled_seconds: float = 60  # once ready for so long, earlier failures are forgotten


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """Its processes run. It is not ready before its `/health` says so."""

    worker_id: str
    generation: int
    url: str
    pid: int
    gc_folder: Path
    events: EventEndpoints | None


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """No process of it is left. `returncode` is -N after signal N, None if it never ran."""

    worker_id: str
    generation: int
    reason: str
    returncode: int | None
    last_log_lines: tuple[str, ...]
    restart_in_seconds: float | None  # None: it is not started again


@dataclass(frozen=True, slots=True)
class OrphansFound:
    """Workers' processes that outlived both their gateway and their guardian. They are let be."""

    pids: tuple[int, ...]


Event = WorkerStarted | WorkerExited | OrphansFound


@dataclass(slots=True)
class _Worker:
    plan: LaunchPlan
    log: WorkerLog
    port: HeldPort
    pause_seconds: float  # before the next restart
    generation: int = 0
    process: GuardedProcess | None = None
    events: HeldEndpoints | None = None
    end_reason: str | None = None  # why we are ending this generation ourselves
    ready_since_seconds: float | None = None  # by the event loop's clock
    start_limit: asyncio.TimerHandle | None = None
    hurry: asyncio.Event = field(default_factory=asyncio.Event)  # no pause after this generation
    next_start: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Owns all workers' processes. `on_event` is called from the event loop, in order."""

    def __init__(
        self,
        plans: Sequence[LaunchPlan],
        options: SupervisorOptions,
        on_event: Callable[[Event], None],
    ) -> None:
        self._plans = plans
        self._options = options
        self._on_event = on_event
        self._folder = options.state_folder.resolve()
        # Workers run where nothing lies that Python could import by accident.
        self._empty_folder = self._folder / "empty"
        self._lock: int | None = None
        self._workers: dict[str, _Worker] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    async def start(self) -> None:
        """Starts all workers. Raises StateFolderInUse, or OSError if the folder cannot be used."""
        self._take_folder()
        if pids := orphans(self._empty_folder):
            self._on_event(OrphansFound(tuple(pids)))
        for plan in self._plans:
            self._workers[plan.worker_id] = _Worker(
                plan,
                WorkerLog(self._folder / "logs" / f"worker-{plan.worker_id}.log"),
                HeldPort(),
                self._options.first_pause_seconds,
            )
        self._tasks = [asyncio.create_task(self._keep(w)) for w in self._workers.values()]

    async def stop(self, grace_seconds: float) -> None:
        """Ends all workers: SIGTERM, then SIGKILL after `grace_seconds` at most. None is left."""
        self._stop_workers(grace_seconds)
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)  # they have logged them
        finally:
            for worker in self._workers.values():
                worker.port.close()
                if worker.events is not None:
                    worker.events.close()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def kill_now(self) -> None:
        """SIGKILL for all workers at once. `stop` still tells when nothing is left."""
        self._stop_workers(0)

    async def restart(self, worker_id: str) -> None:
        """Ends the worker's generation. Returns when the next has started, or cannot start."""
        worker = self._workers[worker_id]
        next_start = worker.next_start
        worker.hurry.set()
        self._end(worker, "restart asked for", self._options.grace_seconds)
        await next_start.wait()

    def mark_ready(self, worker_id: str, generation: int) -> None:
        """The worker serves. Ignored when that generation has ended meanwhile."""
        worker = self._workers[worker_id]
        if worker.generation == generation and worker.ready_since_seconds is None:
            worker.ready_since_seconds = asyncio.get_running_loop().time()
            if worker.start_limit is not None:
                worker.start_limit.cancel()

    def _take_folder(self) -> None:
        for folder in (self._empty_folder, self._folder / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            message = f"another gateway is using {self._folder}: give this one its own --state-dir"
            raise StateFolderInUse(message) from None
        self._lock = lock
        shutil.rmtree(self._folder / "gc", ignore_errors=True)

    def _stop_workers(self, grace_seconds: float) -> None:
        self._stopping = True
        for worker in self._workers.values():
            worker.hurry.set()
            self._end(worker, "stopped", grace_seconds)

    def _end(self, worker: _Worker, reason: str, grace_seconds: float) -> None:
        worker.end_reason = reason
        if worker.ready_since_seconds is None:
            grace_seconds = min(grace_seconds, self._options.unserved_grace_seconds)
        if worker.process is not None:
            worker.process.stop(grace_seconds)

    async def _keep(self, worker: _Worker) -> None:
        """The life of one worker: generation after generation, until `stop`."""
        try:
            while not self._stopping:
                reason, returncode = await self._run_generation(worker)
                pause_seconds = None if self._stopping else self._next_pause_seconds(worker)
                exited = WorkerExited(
                    worker.plan.worker_id,
                    worker.generation,
                    worker.end_reason or reason,
                    returncode,
                    worker.log.last_lines(),
                    pause_seconds,
                )
                self._on_event(exited)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_seconds):
                        await worker.hurry.wait()
        except Exception:
            logger.exception("worker %s is no longer supervised", worker.plan.worker_id)
            raise
        finally:
            worker.next_start.set()

    async def _run_generation(self, worker: _Worker) -> tuple[str, int | None]:
        """Starts the worker and waits until nothing of it is left: how it ended, its status."""
        worker.generation += 1
        worker.end_reason = worker.ready_since_seconds = worker.start_limit = None
        worker.hurry.clear()
        this_start, worker.next_start = worker.next_start, asyncio.Event()
        try:
            gc_folder = self._fresh_gc_folder(worker)
            worker.process = GuardedProcess(self._command(worker, gc_folder), worker.log)
            pid = await worker.process.started()
            self._limit_start(worker)
            url = f"http://{LOOPBACK}:{worker.port.number}"
            events = None if worker.events is None else worker.events.endpoints
            worker_id, generation = worker.plan.worker_id, worker.generation
            self._on_event(WorkerStarted(worker_id, generation, url, pid, gc_folder, events))
            this_start.set()
            returncode = await worker.process.wait()
        except (OSError, StartFailed) as error:
            return str(error), None
        finally:
            this_start.set()
            if worker.start_limit is not None:
                worker.start_limit.cancel()
            if worker.process is not None:
                worker.process.close()
                worker.process = None
        return _how_it_ended(returncode), returncode

    def _command(self, worker: _Worker, gc_folder: Path) -> Command:
        if not worker.port.is_free():
            worker.port.close()
            worker.port = HeldPort()
        if worker.events is not None:
            worker.events.close()
        worker.events = HeldEndpoints() if worker.plan.kv_events else None
        arguments = [] if worker.events is None else worker.events.arguments()
        return Command(
            worker.plan.argv(worker.port.number, arguments),
            {**worker.plan.environment, GC_FOLDER_VARIABLE: str(gc_folder)},
            self._empty_folder,
            self._options.unserved_grace_seconds,
        )

    def _fresh_gc_folder(self, worker: _Worker) -> Path:
        """Each generation has its own, and only the present one's is kept."""
        folders = self._folder / "gc" / worker.plan.worker_id
        shutil.rmtree(folders, ignore_errors=True)
        folder = folders / str(worker.generation)
        folder.mkdir(parents=True)
        return folder

    def _limit_start(self, worker: _Worker) -> None:
        """Ends the worker if nobody calls `mark_ready` in time."""
        seconds = self._options.start_seconds
        reason = f"not ready within {seconds:g} s"
        worker.start_limit = asyncio.get_running_loop().call_later(
            seconds, self._end, worker, reason, self._options.grace_seconds
        )

    def _next_pause_seconds(self, worker: _Worker) -> float:
        if worker.hurry.is_set():
            return 0
        options = self._options
        now = asyncio.get_running_loop().time()
        ready_since = worker.ready_since_seconds
        if ready_since is not None and now - ready_since >= options.settled_seconds:
            worker.pause_seconds = options.first_pause_seconds
        pause_seconds = worker.pause_seconds
        worker.pause_seconds = min(2 * pause_seconds, options.longest_pause_seconds)
        return pause_seconds


def _how_it_ended(returncode: int) -> str:
    if returncode < 0:
        return f"ended by signal {-returncode} ({signal.strsignal(-returncode)})"
    return f"exited with status {returncode}"
