"""Fixtures that every folder of tests shares: fake workers, and gateways as real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fake_worker import FakeWorker
from tests.gateway_process import GatewayProcess
from tests.real import up

__all__ = ["up"]

StartGateway = Callable[..., GatewayProcess]

_running: list[GatewayProcess] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A failing test shows the last lines of each gateway that runs."""
    report = yield
    if report.failed:
        for gateway in _running:
            report.sections.append((f"gateway {gateway.url}", gateway.log()[-4000:]))
    return report


@pytest.fixture(scope="module")
def fake_workers() -> Iterator[list[FakeWorker]]:
    """Two fake workers, for the whole module; scripts and what was received go after each test."""
    with FakeWorker() as first, FakeWorker() as second:
        yield [first, second]


@pytest.fixture(scope="module")
def program() -> list[str]:
    """What Python is started with to be a gateway."""
    return ["-m", "gateway"]


@pytest.fixture(scope="module")
def start_module_gateway(
    tmp_path_factory: pytest.TempPathFactory, program: list[str]
) -> Iterator[StartGateway]:
    """Start gateways that live as long as the module."""
    yield from _starting(tmp_path_factory.mktemp("gateway"), program)


@pytest.fixture
def start_gateway(tmp_path: Path, program: list[str]) -> Iterator[StartGateway]:
    """start_gateway(*args, workers=[url, ...], env={...}, ready=200): a gateway of this test's own.

    `ready` is the status of `/ready` to wait for; None does not wait.
    """
    yield from _starting(tmp_path, program)


def _starting(folder: Path, program: list[str]) -> Iterator[StartGateway]:
    mine: list[GatewayProcess] = []

    def start(
        *args: str,
        workers: list[str],
        env: dict[str, str] | None = None,
        ready: int | None = 200,
    ) -> GatewayProcess:
        gateway = GatewayProcess(folder, workers, args, env, program)
        mine.append(gateway)
        _running.append(gateway)
        if ready is not None:
            gateway.wait_ready(ready)
        return gateway

    yield start
    failures = []
    for gateway in mine:
        _running.remove(gateway)
        try:
            gateway.stop()
        except AssertionError as failure:
            failures.append(failure)
    if failures:
        raise ExceptionGroup("gateways that did not end well", failures)


@pytest.fixture(scope="module")
def gateway(
    request: pytest.FixtureRequest,
    start_module_gateway: StartGateway,
    fake_workers: list[FakeWorker],
) -> GatewayProcess:
    """A gateway before the two fake workers; a module's `GATEWAY_ARGS` are its settings."""
    args = getattr(request.module, "GATEWAY_ARGS", [])
    gateway = start_module_gateway(*args, workers=[worker.url for worker in fake_workers])
    gateway.wait_up(len(fake_workers))
    return gateway
