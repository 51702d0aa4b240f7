from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gateway.workers.guarded import orphans
from gateway.workers.launch import LaunchPlan
from gateway.workers.supervisor import (
    Event,
    OrphansFound,
    StateFolderInUse,
    Supervisor,
    SupervisorOptions,
    WorkerExited,
    WorkerStarted,
)
from tests.unit.workers.processes import (
    FAKE_ENGINE,
    alive,
    argument,
    children,
    engine_pids,
    guardian_of,
    living,
    until_gone,
)
from tests.waiting import until

SOON_SECONDS = 10.0
REPOSITORY = Path(__file__).parents[3]


def plan(worker_id: str = "0", traits: str = "", program: str = sys.executable) -> LaunchPlan:
    return LaunchPlan(
        worker_id, "nothing", (program, FAKE_ENGINE, traits), dict(os.environ), None, None
    )


class Watched:
    """A supervisor and its events in order, awaited one by one."""

    def __init__(self, plans: list[LaunchPlan], options: SupervisorOptions) -> None:
        self.supervisor = Supervisor(plans, options, self._on_event)
        self.when_told: Callable[[Event], None] = lambda _: None
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def _on_event(self, event: Event) -> None:
        self.when_told(event)
        self._events.put_nowait(event)

    async def next(self) -> Event:
        async with asyncio.timeout(SOON_SECONDS):
            return await self._events.get()

    async def started(self) -> WorkerStarted:
        event = await self.next()
        assert isinstance(event, WorkerStarted), event
        return event

    async def exited(self) -> WorkerExited:
        event = await self.next()
        assert isinstance(event, WorkerExited), event
        return event

    def no_more_events(self) -> bool:
        return self._events.empty()


@asynccontextmanager
async def running(
    folder: Path, *plans: LaunchPlan, **options: Any
) -> AsyncIterator[tuple[Watched, Supervisor]]:
    """Started, and stopped at the end."""
    quick = {
        "first_pause_seconds": 0.01,
        "longest_pause_seconds": 0.04,
        "unserved_grace_seconds": 5.0,
    }
    watched = Watched(list(plans) or [plan()], SupervisorOptions(folder, **{**quick, **options}))
    await watched.supervisor.start()
    try:
        yield watched, watched.supervisor
    finally:
        async with asyncio.timeout(SOON_SECONDS):
            await watched.supervisor.stop(0)


Case = Callable[[], Awaitable[None]]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Case], None]:
    runner = uvloop.run if request.param == "uvloop" else asyncio.run

    def run_case(case: Case) -> None:
        runner(case())  # type: ignore[arg-type]

    return run_case


def test_a_worker_s_start_is_told_with_all_that_is_known(
    tmp_path: Path, run: Callable[[Case], None]
) -> None:
    async def case() -> None:
        async with running(tmp_path) as (watched, _):
            started = await watched.started()
            pids = engine_pids(started.gc_folder)
            assert (started.worker_id, started.generation) == ("0", 1)
            assert started.pid == pids["api"]
            assert started.gc_folder == tmp_path / "gc" / "0" / "1"
            assert os.readlink(f"/proc/{started.pid}/cwd") == str(tmp_path / "empty")
            assert started.url == f"http://127.0.0.1:{argument(started.pid, '--port')}"
        assert living(pids) == []

    run(case)


def test_an_exit_is_told_when_nothing_is_left_and_the_worker_is_started_again(
    tmp_path: Path, run: Callable[[Case], None]
) -> None:
    async def case() -> None:
        async with running(tmp_path) as (watched, _):
            first = await watched.started()
            pids = engine_pids(first.gc_folder)
            left: list[list[str]] = []
            watched.when_told = lambda _: left.append(living(pids))
            os.kill(pids["api"], signal.SIGKILL)
            exited = await watched.exited()
            assert left[0] == []
            assert (exited.generation, exited.returncode) == (1, -signal.SIGKILL)
            assert exited.reason == "ended by signal 9 (Killed)"
            second = await watched.started()
            assert (second.generation, second.url) == (2, first.url)
            assert second.gc_folder == tmp_path / "gc" / "0" / "2"
            assert not first.gc_folder.exists()
            engine_pids(second.gc_folder)

    run(case)


def test_a_guardian_that_is_killed_takes_its_worker_with_it(
    tmp_path: Path, run: Callable[[Case], None]
) -> None:
    async def case() -> None:
        async with running(tmp_path) as (watched, _):
            pids = engine_pids((await watched.started()).gc_folder)
            left: list[list[str]] = []
            watched.when_told = lambda _: left.append(living(pids))
            os.kill(guardian_of(pids), signal.SIGKILL)
            await watched.exited()
            assert left[0] == []
            assert (await watched.started()).generation == 2

    run(case)


def test_the_other_workers_are_left_alone(tmp_path: Path) -> None:
    async def case() -> None:
        async with running(tmp_path, plan("a"), plan("b")) as (watched, _):
            starts = {event.worker_id: event for event in [await watched.started() for _ in "ab"]}
            assert starts["a"].url != starts["b"].url
            others = engine_pids(starts["b"].gc_folder)
            os.kill(engine_pids(starts["a"].gc_folder)["api"], signal.SIGKILL)
            assert (await watched.exited()).worker_id == "a"
            assert (await watched.started()).worker_id == "a"
            assert living(others) == ["api", "core", "worker"]
            assert watched.no_more_events()

    asyncio.run(case())


def test_a_failing_start_is_told_with_its_own_last_lines_and_pauses_grow(tmp_path: Path) -> None:
    async def case() -> None:
        async with running(tmp_path, plan(traits="quick=7")) as (watched, _):
            pauses = []
            for generation in range(1, 6):
                started = await watched.started()
                exited = await watched.exited()
                assert exited.generation == started.generation == generation
                assert (exited.reason, exited.returncode) == ("exited with status 7", 7)
                lines = [f"line {number} of {started.pid}" for number in range(3)]
                assert list(exited.last_log_lines) == lines
                pauses.append(exited.restart_in_seconds)
            assert pauses == [0.01, 0.02, 0.04, 0.04, 0.04]
        log = (tmp_path / "logs" / "worker-0.log").read_text()
        assert log.count("line 0 of") >= 5

    asyncio.run(case())


def test_a_high_exit_status_is_not_taken_for_a_signal(tmp_path: Path) -> None:
    async def case() -> None:
        async with running(tmp_path, plan(traits="quick=255")) as (watched, _):
            await watched.started()
            assert (await watched.exited()).returncode == 255

    asyncio.run(case())


def test_a_command_that_cannot_be_executed(tmp_path: Path) -> None:
    async def case() -> None:
        async with running(tmp_path, plan(program="/nowhere/at/all")) as (watched, _):
            for generation in (1, 2):
                exited = await watched.exited()
                assert (exited.generation, exited.returncode) == (generation, None)
                assert exited.reason == "the command cannot be executed"
                assert "/nowhere/at/all" in exited.last_log_lines[0]

    asyncio.run(case())


def test_a_worker_that_stayed_ready_is_forgiven_its_failures(tmp_path: Path) -> None:
    async def case() -> None:
        options = {"settled_seconds": 0.0}
        async with running(tmp_path, plan(), **options) as (watched, supervisor):
            pauses = []
            for ready in (False, False, True, False):
                started = await watched.started()
                if ready:
                    supervisor.mark_ready("0", started.generation)
                os.kill(started.pid, signal.SIGKILL)
                pauses.append((await watched.exited()).restart_in_seconds)
            assert pauses == [0.01, 0.02, 0.01, 0.02]

    asyncio.run(case())


def test_a_worker_that_was_ready_too_shortly_is_not_forgiven(tmp_path: Path) -> None:
    async def case() -> None:
        async with running(tmp_path, plan(), settled_seconds=60.0) as (watched, supervisor):
            pauses = []
            for _ in range(2):
                started = await watched.started()
                supervisor.mark_ready("0", started.generation)
                os.kill(started.pid, signal.SIGKILL)
                pauses.append((await watched.exited()).restart_in_seconds)
            assert pauses == [0.01, 0.02]

    asyncio.run(case())


def test_a_worker_not_ready_in_time_is_ended_and_started_again(tmp_path: Path) -> None:
    async def case() -> None:
        async with running(tmp_path, start_seconds=0.3) as (watched, supervisor):
            await watched.started()
            exited = await watched.exited()
            assert exited.reason == "not ready within 0.3 s"
            assert exited.restart_in_seconds == 0.01
            started = await watched.started()
            supervisor.mark_ready("0", started.generation)
            os.kill(started.pid, signal.SIGKILL)
            assert (await watched.exited()).reason == "ended by signal 9 (Killed)"

    asyncio.run(case())


def test_a_ready_worker_has_no_limit_any_more(tmp_path: Path) -> None:
    async def case() -> None:
        ready, loading = plan("ready"), plan("loading")
        async with running(tmp_path, ready, loading, start_seconds=0.3) as (watched, supervisor):
            for _ in range(2):
                started = await watched.started()
                if started.worker_id == "ready":
                    supervisor.mark_ready("ready", started.generation)
            for _ in range(3):
                assert (await watched.exited()).worker_id == "loading"
                assert (await watched.started()).worker_id == "loading"

    asyncio.run(case())


def test_a_late_word_of_an_ended_generation_s_readiness_is_ignored(tmp_path: Path) -> None:
    async def case() -> None:
        async with running(tmp_path, start_seconds=0.2) as (watched, supervisor):
            first = await watched.started()
            await watched.exited()
            await watched.started()
            supervisor.mark_ready("0", first.generation)
            assert (await watched.exited()).reason == "not ready within 0.2 s"

    asyncio.run(case())


def test_restart_ends_the_generation_and_waits_for_the_next(
    tmp_path: Path, run: Callable[[Case], None]
) -> None:
    async def case() -> None:
        async with running(tmp_path, first_pause_seconds=60.0) as (watched, supervisor):
            first = await watched.started()
            pids = engine_pids(first.gc_folder)
            await supervisor.restart("0")
            assert living(pids) == []
            exited = await watched.exited()
            assert (exited.reason, exited.restart_in_seconds) == ("restart asked for", 0)
            assert (await watched.started()).generation == 2
            assert watched.no_more_events()

    run(case)


def test_restart_cuts_a_pause_short(tmp_path: Path) -> None:
    async def case() -> None:
        options = {"first_pause_seconds": 60.0, "longest_pause_seconds": 60.0}
        async with running(tmp_path, **options) as (watched, supervisor):
            for generation in (1, 2):
                started = await watched.started()
                assert started.generation == generation
                os.kill(started.pid, signal.SIGKILL)
                assert (await watched.exited()).restart_in_seconds == 60
                await supervisor.restart("0")

    asyncio.run(case())


def test_restart_returns_when_the_supervisor_stops(tmp_path: Path) -> None:
    async def case() -> None:
        async with running(tmp_path, plan(traits="stubborn")) as (watched, supervisor):
            engine_pids((await watched.started()).gc_folder)
            restart = asyncio.create_task(supervisor.restart("0"))
            await supervisor.stop(0)
            async with asyncio.timeout(SOON_SECONDS):
                await restart

    asyncio.run(case())


def test_each_start_tells_its_events_at_addresses_of_its_own(tmp_path: Path) -> None:
    async def case() -> None:
        telling = dataclasses.replace(plan(), kv_events=True)
        async with running(tmp_path, telling) as (watched, supervisor):
            first = await watched.started()
            assert first.events is not None and first.events.bound
            config = json.loads(argument(first.pid, "--kv-events-config"))
            assert config["endpoint"] == first.events.live
            assert config["replay_endpoint"] == first.events.replay
            await supervisor.restart("0")
            await watched.exited()
            again = await watched.started()
            assert again.events is not None and again.events.live != first.events.live

    asyncio.run(case())


def test_a_port_taken_by_another_is_exchanged(tmp_path: Path) -> None:
    async def case() -> None:
        async with running(tmp_path) as (watched, _):
            first = await watched.started()
            port = int(first.url.rpartition(":")[2])
            with socket.socket() as squatter:
                squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                squatter.bind(("127.0.0.1", port))
                squatter.listen()
                os.kill(first.pid, signal.SIGKILL)
                await watched.exited()
                second = await watched.started()
            assert second.url != first.url

    asyncio.run(case())


def test_a_worker_s_port_is_given_to_nobody_else(tmp_path: Path) -> None:
    async def case() -> None:
        async with running(tmp_path) as (watched, _):
            port = int((await watched.started()).url.rpartition(":")[2])
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
            with socket.socket() as worker:  # as a vLLM that listens at last
                worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                worker.bind(("127.0.0.1", port))
                worker.listen()

    asyncio.run(case())


def test_stop_kills_after_the_grace_and_leaves_nothing(
    tmp_path: Path, run: Callable[[Case], None]
) -> None:
    async def case() -> None:
        stubborn, polite = plan("0", "stubborn,leaving"), plan("1")
        async with running(tmp_path) as (watched, _):
            await watched.started()  # the event loop opens some descriptors when first used
        await asyncio.sleep(0)
        descriptors = os.listdir("/proc/self/fd")
        async with running(tmp_path, stubborn, polite) as (watched, supervisor):
            pids = [engine_pids((await watched.started()).gc_folder) for _ in range(2)]
            supervisor.mark_ready("0", 1)
            stopped_at = time.monotonic()
            await supervisor.stop(0.3)
            assert 0.3 <= time.monotonic() - stopped_at < 3
            assert [living(engine) for engine in pids] == [[], []]
            for _ in range(2):
                exited = await watched.exited()
                assert (exited.reason, exited.restart_in_seconds) == ("stopped", None)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await asyncio.sleep(0)  # transports close their descriptors in a callback
        assert os.listdir("/proc/self/fd") == descriptors
        assert children() == []

    run(case)


def test_a_worker_that_is_loading_gets_a_short_grace(tmp_path: Path) -> None:
    async def case() -> None:
        stubborn = plan(traits="stubborn")
        async with running(tmp_path, stubborn, unserved_grace_seconds=0.1) as (watched, supervisor):
            pids = engine_pids((await watched.started()).gc_folder)
            async with asyncio.timeout(SOON_SECONDS):
                await supervisor.stop(60)
            assert living(pids) == []

    asyncio.run(case())


def test_kill_now_hurries_a_stop(tmp_path: Path) -> None:
    async def case() -> None:
        async with running(tmp_path, plan(traits="stubborn")) as (watched, supervisor):
            pids = engine_pids((await watched.started()).gc_folder)
            supervisor.mark_ready("0", 1)
            stop = asyncio.create_task(supervisor.stop(60))
            await asyncio.sleep(0)
            supervisor.kill_now()
            async with asyncio.timeout(SOON_SECONDS):
                await stop
            assert living(pids) == []

    asyncio.run(case())


def test_stop_during_a_start(tmp_path: Path) -> None:
    async def case() -> None:
        async with running(tmp_path) as (watched, supervisor):
            await asyncio.sleep(0)  # the guardian has been started, and has not answered yet
            await supervisor.stop(0)
            assert (await watched.started()).generation == 1
            assert (await watched.exited()).reason == "stopped"

    asyncio.run(case())


def test_stop_before_a_start_and_during_a_pause(tmp_path: Path) -> None:
    async def case() -> None:
        async with running(tmp_path) as (watched, supervisor):
            await supervisor.stop(0)
            assert watched.no_more_events()
        options = {"first_pause_seconds": 60.0, "longest_pause_seconds": 60.0}
        async with running(tmp_path, plan(traits="quick=1"), **options) as (watched, supervisor):
            await watched.started()
            await watched.exited()
            async with asyncio.timeout(SOON_SECONDS):
                await supervisor.stop(60)
            assert watched.no_more_events()

    asyncio.run(case())


def test_a_state_folder_has_one_gateway(tmp_path: Path) -> None:
    async def case() -> None:
        async with running(tmp_path):
            second = Supervisor([plan()], SupervisorOptions(tmp_path), lambda _: None)
            with pytest.raises(StateFolderInUse, match=str(tmp_path)):
                await second.start()
            await second.stop(0)
        async with running(tmp_path) as (watched, _):
            await watched.started()

    asyncio.run(case())


Own = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Own]:
    """Starts a process that owns a worker as the gateway does."""
    owners: list[subprocess.Popen[bytes]] = []

    def start(loop: str, trait: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.unit.workers.owner", str(tmp_path), loop, trait]
        owners.append(subprocess.Popen(command, cwd=REPOSITORY))
        return owners[-1]

    yield start
    for owner in owners:
        owner.kill()
        owner.wait(SOON_SECONDS)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_killed_gateway_leaves_nothing(tmp_path: Path, own: Own, loop: str) -> None:
    owner = own(loop, "wait")
    pids = engine_pids(tmp_path / "gc" / "0" / "1")
    pids["guardian"] = guardian_of(pids)
    owner.kill()
    until_gone(pids)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_gateway_that_fails_leaves_nothing(tmp_path: Path, own: Own, loop: str) -> None:
    owner = own(loop, "raise")
    pids = engine_pids(tmp_path / "gc" / "0" / "1")
    assert owner.wait(SOON_SECONDS) == 1
    until_gone(pids)


def test_ctrl_c_reaches_the_gateway_alone(tmp_path: Path, own: Own) -> None:
    own("asyncio", "wait")
    pids = engine_pids(tmp_path / "gc" / "0" / "1")
    assert os.getsid(0) not in {os.getsid(pid) for pid in pids.values()}


def test_orphans_are_those_whose_session_has_no_leader_any_more(tmp_path: Path) -> None:
    leader = subprocess.Popen(
        [sys.executable, FAKE_ENGINE, ""],
        cwd=tmp_path,
        env={**os.environ, "GATEWAY_GC_DIR": str(tmp_path)},
        start_new_session=True,
    )
    pids = engine_pids(tmp_path)
    assert orphans(tmp_path) == []
    leader.kill()
    leader.wait(SOON_SECONDS)
    assert orphans(tmp_path) == sorted([pids["core"], pids["worker"]])
    assert orphans(tmp_path / "elsewhere") == []
    for part in ("core", "worker"):
        os.kill(pids[part], signal.SIGKILL)
    until_gone(pids)


def test_orphans_are_told_and_let_be(tmp_path: Path, own: Own) -> None:
    owner = own("asyncio", "wait")
    pids = engine_pids(tmp_path / "gc" / "0" / "1")
    os.kill(owner.pid, signal.SIGSTOP)  # or it would notice the guardian's death
    os.kill(guardian_of(pids), signal.SIGKILL)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait(SOON_SECONDS)
    until("the command dies with its guardian", lambda: not alive(pids["api"]))

    async def case() -> None:
        async with running(tmp_path) as (watched, _):
            found = await watched.next()
            assert found == OrphansFound(tuple(sorted([pids["core"], pids["worker"]])))
            await watched.started()
        assert living(pids) == ["core", "worker"]

    try:
        asyncio.run(case())
    finally:
        for part in ("core", "worker"):
            with suppress(ProcessLookupError):
                os.kill(pids[part], signal.SIGKILL)
    until_gone(pids)
