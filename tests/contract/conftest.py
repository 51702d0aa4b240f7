"""What every contract case has in common: afterwards, nothing of it is left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.expect import Counted
from tests.fake_worker import FakeWorker
from tests.gateway_process import GatewayProcess
from tests.raw_http import TEST_ID_HEADER, sent_bodies
from tests.waiting import until


@pytest.fixture
def gateway_url(gateway: GatewayProcess) -> str:
    return gateway.url


@pytest.fixture
def model_name(fake_workers: list[FakeWorker]) -> str:
    return fake_workers[0].model


@pytest.fixture
def counted(gateway: GatewayProcess) -> Counted:
    return Counted(gateway)


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """In-flight 0, pool active 0, no stray socket, and each worker received what was sent."""
    names = request.fixturenames
    workers = request.getfixturevalue("fake_workers") if "fake_workers" in names else []
    gateway = request.getfixturevalue("gateway") if "gateway" in names else None
    sent_bodies.clear()
    yield
    try:
        if gateway is not None:
            check_nothing_left(gateway, workers)
    finally:
        for worker in workers:
            worker.reset()
    if gateway is not None:
        gateway.wait_up(len(workers))


def check_nothing_left(gateway: GatewayProcess, workers: list[FakeWorker]) -> None:
    """No request in flight, no connection in use or forgotten, no body changed on its way."""
    left: list[str] = []

    def nothing_left() -> bool:
        left[:] = leftovers(gateway, workers)
        return not left

    until(f"nothing is left but {left}", nothing_left, 3)
    for worker in workers:
        for received in worker.inference:
            test_id = received.header(TEST_ID_HEADER)
            if test_id in sent_bodies:
                assert received.body == sent_bodies[test_id], "the body was changed on its way"


def leftovers(gateway: GatewayProcess, workers: list[FakeWorker]) -> list[str]:
    """What a request left behind, in metrics and in sockets.

    Of the connections to workers only those that carried an inference request count: probes and
    scrapes keep theirs.
    """
    left = []
    idle, gauges = 0.0, 0
    for (name, labels), value in gateway.samples().items():
        state = dict(labels).get("state")
        if name == "gateway_upstream_connections" and state == "idle":
            idle += value
        elif name in ("gateway_in_flight_requests", "gateway_upstream_connections"):
            gauges += 1
            left += [f"{name}{dict(labels)} = {value:g}"] if value else []
    assert gauges == 2 * len(workers), "gauges of in-flight requests or connections are missing"
    sockets = gateway.sockets()
    if any(":" in worker.host for worker in workers):
        sockets += gateway.sockets(ipv6=True)
    carried = [c for worker in workers for c in worker.server.connections if c.carried_inference]
    established = {local for local, _, state in sockets if state == "ESTABLISHED"}
    still_open = sum(c.open and c.peer_port in established for c in carried)
    if still_open > idle:
        left.append(f"{still_open} connections to workers, {idle:g} of them idle in the pool")
    ours = {c.peer_port for c in carried} | {gateway.port}
    left += [str(each) for each in sockets if each[2] == "CLOSE_WAIT" and each[0] in ours]
    return left
