"""More at once than any library's default or a shell's limit of open files."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.bodies import CHAT, chat, scripted
from tests.conftest import StartGateway
from tests.contract.conftest import check_nothing_left
from tests.contract.expect import Counted
from tests.fake_worker import FakeWorker
from tests.gateway_process import GatewayProcess
from tests.raw_http import RawClient, exchange
from tests.waiting import until

STREAMS = 600
SHELL_FILES = 1024  # what a shell or a service is given by default


@pytest.fixture
def started_by_a_shell(
    start_gateway: StartGateway, fake_workers: list[FakeWorker]
) -> Iterator[GatewayProcess]:
    """A gateway that inherits a low soft limit; the test itself has room for both other sides."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard >= 4 * STREAMS, "this machine does not allow for so many open files"
    resource.setrlimit(resource.RLIMIT_NOFILE, (SHELL_FILES, hard))
    try:
        gateway = start_gateway(workers=[worker.url for worker in fake_workers])
        gateway.wait_up(len(fake_workers))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4 * STREAMS), hard))
        yield gateway
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_c20_six_hundred_streams_at_once(
    started_by_a_shell: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    """Open together, alive together, each whole, and the gateway answers others meanwhile."""
    gateway = started_by_a_shell
    counted = Counted(gateway)
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(gateway.url, 30)) for _ in range(STREAMS)]
        for i, client in enumerate(clients):
            body = chat(f"{i} is my number", stream=True, max_tokens=8)
            script = scripted(gates={"2": "on"}, gap_seconds=0.05)
            client.send("POST", CHAT, json.dumps(body).encode(), script)
        until(
            "all run",
            lambda: sum(worker.engine.running for worker in fake_workers) == STREAMS,
            30,
        )
        assert gateway.total("gateway_in_flight_requests") == STREAMS
        assert gateway.total("gateway_upstream_connections", state="active") == STREAMS
        assert exchange(gateway.url, CHAT, chat("one more")).status == 200
        for worker in fake_workers:
            worker.open_gate("on")
        started = time.monotonic()
        assert exchange(gateway.url, "/health").status == 200
        assert time.monotonic() - started < 2
        answers = [client.read() for client in clients]
    for answer in answers:
        assert (answer.status, answer.end, len(answer.data())) == (200, "complete", 10)
    counted.is_(ok=STREAMS + 1)
    check_nothing_left(gateway, fake_workers)
