"""SIGTERM: what runs may finish, within a limit; a second signal hurries."""

from __future__ import annotations

import json
import signal
import time

import pytest

from tests.bodies import CHAT, chat, scripted
from tests.conftest import StartGateway
from tests.fake_worker import FakeWorker
from tests.raw_http import RawClient, exchange
from tests.waiting import until

STREAM = json.dumps(chat(stream=True)).encode()


def test_c39_running_streams_finish(
    start_gateway: StartGateway, fake_workers: list[FakeWorker]
) -> None:
    gateway = start_gateway(workers=[w.url for w in fake_workers])
    with RawClient(gateway.url) as client, RawClient(gateway.url) as plain:
        client.send("POST", CHAT, STREAM, scripted(gates={"2": "on"}))
        plain.send("POST", CHAT, json.dumps(chat()).encode(), scripted(gates={"head": "on"}))
        answer = client.read_head()
        client.read_events(answer, 2)
        until("both run", lambda: sum(w.engine.running for w in fake_workers) == 2)
        gateway.process.send_signal(signal.SIGTERM)
        until("nobody new is served", lambda: not_served(gateway.url))
        for worker in fake_workers:
            worker.open_gate("on")
        for _ in client.read_pieces(answer):
            pass
        assert (answer.end, answer.data()[-1]) == ("complete", "[DONE]")
        assert plain.read().status == 200
    assert gateway.process.wait(5) == 0


def not_served(url: str) -> bool:
    try:
        return exchange(url, "/ready", seconds=2).status == 503
    except (ConnectionError, EOFError):
        return True


@pytest.mark.parametrize("second", [False, True], ids=["limit", "second-signal"])
def test_c39_the_limit_and_a_second_signal_end_it(
    start_gateway: StartGateway, fake_workers: list[FakeWorker], second: bool
) -> None:
    drain = "30" if second else "1"
    gateway = start_gateway("--drain-seconds", drain, workers=[w.url for w in fake_workers])
    with RawClient(gateway.url) as client:
        client.send("POST", CHAT, STREAM, scripted(gates={"2": "never"}))
        answer = client.read_head()
        client.read_events(answer, 2)
        started = time.monotonic()
        gateway.process.send_signal(signal.SIGTERM)
        until("nobody new is served", lambda: not_served(gateway.url))
        if second:
            gateway.process.send_signal(signal.SIGTERM)
        for _ in client.read_pieces(answer):
            pass
    assert answer.end == "cut"
    assert b"[DONE]" not in answer.body
    assert gateway.process.wait(5) == 0
    assert time.monotonic() - started < (3 if second else 5)
    until("no worker works on", lambda: not any(w.engine.running for w in fake_workers))


def test_idle_gateway_ends_at_once(
    start_gateway: StartGateway, fake_workers: list[FakeWorker]
) -> None:
    gateway = start_gateway(workers=[w.url for w in fake_workers])
    with RawClient(gateway.url) as idle:
        idle.send("GET", "/health")
        assert idle.read().status == 200
        started = time.monotonic()
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(5) == 0
        assert time.monotonic() - started < 2
        assert idle.closed_by_peer()
