"""Workers watched over real HTTP: when they are opened, closed and known to be new."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from gateway.core.blocks import Prompt, token_bytes
from gateway.core.options import Options
from gateway.core.placement import POLICIES
from gateway.core.request import Request
from gateway.core.reservation import WorkerId
from gateway.core.router import Router
from gateway.core.worker import Engine, Loss, Worker
from gateway.workers import fleet as fleet_module
from gateway.workers.fleet import Every, Fleet, Hooks
from gateway.workers.kv_endpoints import EventEndpoints
from gateway.workers.probe import Limits, WorkerClient
from tests.fake_worker.kv_events import EventPublisher, stored
from tests.unit.loopback import Served, eventually, run, serving
from tests.unit.workers.worker_http import MODELS, SERVER_INFO, WorkerHttp, metrics

A, B = WorkerId("a"), WorkerId("b")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_START_PROBE_SECONDS", 0.005)


@dataclass
class Watching:
    """A fleet with what it told of."""

    limits: Limits = field(default_factory=Limits)
    moved: list[tuple[WorkerId, str]] = field(default_factory=list)
    identified: list[list[dict[str, Any]]] = field(default_factory=list)
    ready: list[WorkerId] = field(default_factory=list)
    refuse: Exception | None = None
    meanwhile: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.router = Router(Options(policy=POLICIES["least_work"]))
        hooks = Hooks(
            lambda worker, url: self.moved.append((worker, url)), self.identify, self.ready.append
        )
        self.fleet = Fleet(self.router, hooks, self.limits, Every(0.005, 0.005))

    async def identify(self, models: list[dict[str, Any]], client: WorkerClient) -> None:
        self.identified.append(models)
        if self.meanwhile is not None:
            self.meanwhile()
            self.meanwhile = None
        if self.refuse is not None:
            raise self.refuse

    def worker(self, worker_id: WorkerId = A) -> Worker:
        return self.router.workers[worker_id]

    async def until_ready(self, worker_id: WorkerId = A) -> None:
        await eventually("the worker is ready", lambda: self.worker(worker_id).ready)

    async def until_closed(self, worker_id: WorkerId = A) -> None:
        await eventually("the worker is not ready", lambda: not self.worker(worker_id).ready)


@asynccontextmanager
async def watching(
    http: WorkerHttp, limits: Limits | None = None
) -> AsyncIterator[tuple[Watching, Served]]:
    """One worker of that behaviour, watched."""
    async with serving(http) as served:
        watch = Watching(limits or Limits())
        watch.fleet.add(A)
        watch.fleet.started(A, served.url)
        try:
            yield watch, served
        finally:
            await watch.fleet.close()


def test_a_worker_is_opened_when_it_is_healthy_and_known() -> None:
    async def main() -> None:
        http = WorkerHttp()
        http.answers["/health"] = (503, "")
        async with watching(http) as (watch, served):
            await eventually("it is asked again and again", lambda: http.count("/health") >= 3)
            assert not watch.worker().ready
            assert watch.worker().reason == "/health answers 503"
            assert http.count("/v1/models") == 0
            http.answers["/health"] = (200, "")
            await watch.until_ready()
            assert watch.moved == [(A, served.url)]
            assert watch.identified[-1] == MODELS["data"]
            assert watch.ready == [A]
            assert watch.worker().models == {"org/model"}
            assert watch.worker().engine == Engine(32, 500, None, None)
            assert watch.fleet.workers[A].models == MODELS["data"]

    run(main())


def test_the_engine_s_figures_are_followed() -> None:
    async def main() -> None:
        http = WorkerHttp()
        async with watching(http) as (watch, _):
            await watch.until_ready()
            http.answers["/metrics"] = (200, "vllm:num_requests_running 7\n")
            await eventually("the next scrape is kept", lambda: running(watch) == 7)
            http.answers["/metrics"] = (500, "")
            await eventually("what is not told is not known", lambda: running(watch) is None)
            assert watch.worker().ready, "metrics are not health"

    def running(watch: Watching) -> float | None:
        scrape = watch.fleet.workers[A].scrape
        return scrape.running if scrape else None

    run(main())


@pytest.mark.parametrize("text", ["", "noise {{{\n", "vllm:num_requests_running x\n"])
def test_a_worker_without_metrics_is_opened_with_defaults(text: str) -> None:
    async def main() -> None:
        http = WorkerHttp()
        http.answers["/metrics"] = (200, text)
        async with watching(http) as (watch, _):
            await watch.until_ready()
            assert watch.worker().engine == Engine()

    run(main())


@pytest.mark.parametrize(
    ("ours", "told", "known"),
    [
        (Limits(), {"max_num_seqs": 8, "max_num_batched_tokens": 2048}, (8, 2048)),
        (Limits(4, None), {"max_num_seqs": 8, "max_num_batched_tokens": 2048}, (4, 2048)),
        (Limits(4, 512), {"max_num_seqs": 8, "max_num_batched_tokens": 2048}, (4, 512)),
        (Limits(None, 512), None, (None, 512)),
        (Limits(), None, (None, None)),
    ],
)
def test_the_operator_s_limits_go_before_what_the_engine_says(
    ours: Limits, told: dict[str, int] | None, known: tuple[int | None, int | None]
) -> None:
    async def main() -> None:
        http = WorkerHttp()
        if told is not None:
            http.answers[SERVER_INFO] = (200, {"vllm_config": {"scheduler_config": told}})
        async with watching(http, ours) as (watch, _):
            await watch.until_ready()
            engine = watch.worker().engine
            assert (engine.max_num_seqs, engine.max_num_batched_tokens) == known

    run(main())


@pytest.mark.parametrize("said", [(500, ""), (200, "text"), (200, {"data": 5})])
def test_a_worker_that_does_not_say_what_it_serves_is_not_opened(said: tuple[int, Any]) -> None:
    async def main() -> None:
        http = WorkerHttp()
        http.answers["/v1/models"] = said
        async with watching(http) as (watch, _):
            await eventually("it is asked again and again", lambda: http.count("/v1/models") >= 3)
            assert not watch.worker().ready
            assert "/v1/models" in watch.worker().reason
            http.answers["/v1/models"] = (200, MODELS)
            await watch.until_ready()

    run(main())


def test_a_failure_of_ours_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with watching(WorkerHttp()) as (watch, _):
            watch.refuse = LookupError("of ours")
            await eventually("it is tried again and again", lambda: len(watch.identified) >= 3)
            assert not watch.worker().ready
            watch.refuse = None
            await watch.until_ready()

    run(main())
    assert "of ours" in caplog.text


def test_one_missed_probe_is_not_an_end_but_several_are() -> None:
    async def main() -> None:
        http = WorkerHttp()
        async with watching(http) as (watch, _):
            await watch.until_ready()
            http.answers["/health"] = (500, "")
            before = http.count("/health")
            await watch.until_closed()
            assert http.count("/health") - before >= 3
            assert watch.worker().reason == "/health answers 500"
            http.answers["/health"] = (200, "")
            await watch.until_ready()
            assert watch.ready == [A, A]

    run(main())


def test_a_worker_that_cannot_be_reached_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        http = WorkerHttp()
        async with serving(http) as served:
            watch = Watching()
            watch.fleet.add(A)
            watch.fleet.started(A, served.url)
            await watch.until_ready()
            monkeypatch.setattr(fleet_module, "_START_PROBE_SECONDS", 60)
        try:
            await watch.until_closed()
            assert "unreachable" in watch.worker().reason
            assert watch.fleet.workers[A].missed < 3
            assert watch.fleet.workers[A].scrape is None
        finally:
            await watch.fleet.close()

    run(main())


def test_a_report_of_the_data_plane_closes_until_the_next_probe() -> None:
    async def main() -> None:
        async with watching(WorkerHttp()) as (watch, _):
            await watch.until_ready()
            watch.fleet.stopped(A, "connection refused")
            assert (watch.worker().ready, watch.worker().reason) == (False, "connection refused")
            await watch.until_ready()

    run(main())


# --- generations


def test_a_restart_behind_the_same_address_is_a_new_generation() -> None:
    async def main() -> None:
        http = WorkerHttp()
        async with watching(http) as (watch, _):
            await watch.until_ready()
            first = watch.worker().generation
            fill(watch)
            http.answers["/health"] = (503, "")
            await watch.until_closed()
            http.answers |= {"/health": (200, ""), "/metrics": (200, metrics(process_start=200.0))}
            await watch.until_ready()
            assert watch.worker().generation == first + 1
            assert watch.router.index.blocks(A) == 0
            assert watch.fleet.workers[A].starts == 2

    run(main())


def test_a_pause_of_the_same_process_is_no_new_generation() -> None:
    async def main() -> None:
        http = WorkerHttp()
        async with watching(http) as (watch, _):
            await watch.until_ready()
            first = watch.worker().generation
            fill(watch)
            http.answers["/health"] = (503, "")
            await watch.until_closed()
            http.answers["/health"] = (200, "")
            await watch.until_ready()
            assert watch.worker().generation == first
            assert watch.router.index.blocks(A) > 0

    run(main())


def test_a_restart_between_two_probes_is_a_new_generation() -> None:
    async def main() -> None:
        http = WorkerHttp()
        async with watching(http) as (watch, _):
            await watch.until_ready()
            first = watch.worker().generation
            fill(watch)
            http.answers["/metrics"] = (200, metrics(process_start=200.0))
            await eventually("a new generation", lambda: watch.worker().generation > first)
            assert watch.router.index.blocks(A) == 0

    run(main())


SLEEP = 'vllm:engine_sleep_state{{engine="0",sleep_state="{}"}} {}\n'


def sleeping(state: str) -> str:
    states = ("awake", "weights_offloaded", "discard_all")
    return metrics() + "".join(SLEEP.format(each, float(each == state)) for each in states)


@pytest.mark.parametrize("state", ["weights_offloaded", "discard_all"])
def test_an_engine_that_sleeps_has_no_cache_and_takes_no_requests(state: str) -> None:
    async def main() -> None:
        http = WorkerHttp()
        http.answers["/metrics"] = (200, sleeping("awake"))
        async with watching(http) as (watch, _):
            await watch.until_ready()
            first = watch.worker().generation
            fill(watch)
            http.answers["/metrics"] = (200, sleeping(state))
            await watch.until_closed()
            assert watch.worker().reason == "asleep"
            assert watch.router.index.blocks(A) == 0
            asked = http.count("/metrics")
            await eventually("it is looked at again", lambda: http.count("/metrics") > asked + 2)
            assert not watch.worker().ready
            assert watch.worker().losses[Loss.SLEPT] == 1, "once for each sleep"
            http.answers["/metrics"] = (200, sleeping("awake"))
            await watch.until_ready()
            assert watch.worker().generation == first + 1

    run(main())


def fill(watch: Watching) -> None:
    watch.router.admit(Request(Prompt(token_bytes(range(200)), True)), 0.0)
    assert watch.router.index.blocks(A) > 0


def test_a_restart_by_the_supervisor_counts_once() -> None:
    async def main() -> None:
        old, new = WorkerHttp(), WorkerHttp()
        new.answers["/metrics"] = (200, metrics(process_start=200.0, blocks=700))
        async with watching(old) as (watch, _), serving(new) as moved:
            await watch.until_ready()
            watch.fleet.exited(A, "killed by signal 9")
            assert (watch.worker().ready, watch.worker().reason) == (False, "killed by signal 9")
            watch.fleet.started(A, moved.url)
            assert not watch.worker().ready
            await watch.until_ready()
            assert watch.moved[-1] == (A, moved.url)
            assert watch.worker().engine.capacity_blocks == 700
            assert (watch.fleet.workers[A].starts, watch.worker().generation) == (2, 2)

    run(main())


def test_nobody_is_probed_between_exit_and_start() -> None:
    async def main() -> None:
        http = WorkerHttp()
        async with watching(http) as (watch, served):
            await watch.until_ready()
            watch.fleet.exited(A, "ended")
            await eventually("the old connections are closed", lambda: not http.connections)
            before = len(http.asked)
            for _ in range(10):
                await asyncio.sleep(0.005)
            assert len(http.asked) == before
            assert watch.worker().reason == "ended"
            watch.fleet.started(A, served.url)
            await watch.until_ready()

    run(main())


def test_an_answer_of_the_old_process_does_not_open_the_new_one() -> None:
    async def main() -> None:
        old, new = WorkerHttp(), WorkerHttp()
        new.answers["/health"] = (503, "")
        async with serving(new) as moved, watching(old) as (watch, _):
            watch.meanwhile = lambda: watch.fleet.started(A, moved.url)
            await eventually("the new one is asked", lambda: new.count("/health") >= 3)
            assert not watch.worker().ready
            assert watch.ready == []

    run(main())


def test_workers_are_watched_apart() -> None:
    async def main() -> None:
        mute, well = WorkerHttp(), WorkerHttp()
        mute.answers["/health"] = (503, "")
        async with watching(mute) as (watch, _), serving(well) as other:
            watch.fleet.add(B)
            watch.fleet.started(B, other.url)
            await watch.until_ready(B)
            assert not watch.worker(A).ready
            await watch.fleet.close()

    run(main())


# --- the end


@pytest.mark.parametrize("steps", range(12))
def test_closing_ends_at_any_moment(steps: int) -> None:
    async def main() -> None:
        async with watching(WorkerHttp()) as (watch, _):
            await watch.until_ready()
            watch.fleet.workers[A].wake.set()
            for _ in range(steps):
                await asyncio.sleep(0)
            await asyncio.wait_for(watch.fleet.close(), 2)
            task = watch.fleet.workers[A].task
            assert task is not None and task.done()

    run(main())


@pytest.mark.parametrize("moment", range(24))
def test_a_worker_that_ends_while_it_is_probed_leaves_no_connection(
    moment: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        http = WorkerHttp()
        async with watching(http) as (watch, _):
            await watch.until_ready()
            watch.fleet.workers[A].wake.set()
            for _ in range(moment):
                await asyncio.sleep(0)
            watch.fleet.exited(A, "ended")
            await eventually("its connections are closed", lambda: not http.connections, 1)

    run(main())
    assert "it goes on" not in caplog.text


# --- events


def test_events_are_followed_from_start_to_start() -> None:
    async def main() -> None:
        http = WorkerHttp()
        with EventPublisher() as engine:
            endpoints = EventEndpoints(engine.url, engine.replay_url)
            async with watching(http) as (watch, served):
                followed = watch.router.caches.followed[A]
                await watch.until_ready()
                assert not followed.trusted
                engine.publish(stored([1, 2], None, list(range(64)), 32))
                watch.fleet.started(A, served.url, endpoints)
                await eventually("its cache is known", lambda: followed.cache.copies == 2)
                assert followed.trusted and followed.capacity_blocks == 500
                watch.fleet.exited(A, "ended")
                assert (followed.trusted, followed.cache.copies) == (False, 0)
                watch.fleet.started(A, served.url)
                await watch.until_ready()
                assert not followed.alive

    run(main())


def test_a_restart_behind_the_same_address_is_followed_anew() -> None:
    async def main() -> None:
        http = WorkerHttp()
        with EventPublisher() as engine:
            engine.publish(stored([1, 2], None, list(range(64)), 32))
            async with watching(http) as (watch, served):
                followed = watch.router.caches.followed[A]
                watch.fleet.started(A, served.url, EventEndpoints(engine.url, engine.replay_url))
                await watch.until_ready()
                await eventually("its cache is known", lambda: followed.cache.copies == 2)
                await asyncio.to_thread(engine.restart)
                http.answers["/metrics"] = (200, metrics(process_start=200.0))
                await eventually("it is known to be empty", lambda: not followed.cache.copies)
                await eventually("it is trusted", lambda: followed.trusted)

    run(main())
