"""Many at once, slow readers, and when each byte comes out."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack

import pytest

from tests.bodies import CHAT, COMPLETIONS, chat, completion, scripted
from tests.conftest import StartGateway
from tests.contract.conftest import check_nothing_left
from tests.contract.expect import Counted, wait_only
from tests.fake_worker import FakeWorker
from tests.gateway_process import GatewayProcess
from tests.raw_http import RawClient, exchange
from tests.waiting import until

MIB = 1024 * 1024


def at_workers(workers: list[FakeWorker]) -> list[int]:
    return [worker.engine.running for worker in workers]


def test_c20_two_hundred_streams_all_reach_the_workers(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted
) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(gateway.url)) for _ in range(200)]
        for i, client in enumerate(clients):
            body = json.dumps(chat(f"{i} is my number", stream=True)).encode()
            client.send("POST", CHAT, body, scripted(gates={"2": "on"}))
        until("all run", lambda: sum(at_workers(fake_workers)) == 200, 10)
        assert gateway.total("gateway_in_flight_requests") == 200
        assert gateway.total("gateway_upstream_connections", state="active") == 200
        for worker in fake_workers:
            worker.open_gate("on")
        answers = [client.read() for client in clients]
    assert all(a.end == "complete" and a.data()[-1] == "[DONE]" for a in answers)
    counted.is_(ok=200)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
def test_c33_load_counts_from_selection_on(
    start_gateway: StartGateway, fake_workers: list[FakeWorker], path: str, stream: bool
) -> None:
    """Nothing is answered, not even a head: only reservations tell the workers apart.

    A gateway of its own, which has not measured the workers yet and so holds them for equal.
    """
    gateway = start_gateway(workers=[worker.url for worker in fake_workers])
    gateway.wait_up(2)
    make = chat if path == CHAT else completion
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(gateway.url)) for _ in range(32)]
        for i, client in enumerate(clients):
            body = make(f"{i} {time.monotonic_ns()} " * 200, stream=stream, max_tokens=1)
            client.send("POST", path, json.dumps(body).encode(), scripted(gates={"head": "go"}))
        until("all run", lambda: sum(at_workers(fake_workers)) == 32, 10)
        assert min(at_workers(fake_workers)) >= 10
        for worker in fake_workers:
            worker.open_gate("go")
        assert all(client.read().status == 200 for client in clients)
    check_nothing_left(gateway, fake_workers)


def test_c33_answers_that_come_together_do_not_make_one_worker_take_all(
    start_gateway: StartGateway, fake_workers: list[FakeWorker]
) -> None:
    """Whatever was measured of a burst whose first bytes all came at once, as those of a batch
    do: the next burst of unlike prompts is still spread."""
    gateway = start_gateway(workers=[worker.url for worker in fake_workers])
    gateway.wait_up(2)
    for _ in range(4):
        with ExitStack() as stack:
            clients = [stack.enter_context(RawClient(gateway.url)) for _ in range(32)]
            for i, client in enumerate(clients):
                body = chat(f"{i} {time.monotonic_ns()} " * 200, stream=True, max_tokens=1)
                client.send("POST", CHAT, json.dumps(body).encode(), scripted(gates={"head": "go"}))
            until("all run", lambda: sum(at_workers(fake_workers)) == 32, 10)
            running = at_workers(fake_workers)
            for worker in fake_workers:
                worker.open_gate("go")
            for client in clients:
                client.read()
        assert min(running) >= 4
        for worker in fake_workers:
            worker.reset()
    check_nothing_left(gateway, fake_workers)


def test_c22_each_event_is_out_before_the_next_is_made(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    """In lock-step: an event that is held back anywhere, in a lump or a filter, would hang here."""
    events = 20
    gates = {str(i): f"g{i}" for i in range(1, events)}
    lateness = []
    with RawClient(gateway.url, seconds=5) as client:
        headers = [("Accept-Encoding", "gzip, br"), *scripted(gates=gates, text="x" * 250)]
        body = chat(stream=True, max_tokens=events)
        client.send("POST", CHAT, json.dumps(body).encode(), headers)
        answer = client.read_head()
        worker, _ = wait_only(fake_workers)
        client.read_events(answer, 1)
        for i in range(1, events):
            started = time.monotonic()
            worker.open_gate(f"g{i}")
            client.read_events(answer, i + 1)
            lateness.append(time.monotonic() - started)
        for _ in client.read_pieces(answer):
            pass
    assert answer.data()[-1] == "[DONE]"
    assert sorted(lateness)[len(lateness) // 2] < 0.02


def test_c02_c22_head_of_a_stream_comes_before_its_first_event(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    with RawClient(gateway.url, seconds=5) as client:
        body = json.dumps(chat(stream=True)).encode()
        client.send("POST", CHAT, body, scripted(gates={"body": "on"}))
        answer = client.read_head()
        assert answer.status == 200
        for worker in fake_workers:
            worker.open_gate("on")
        for _ in client.read_pieces(answer):
            pass
    assert answer.end == "complete"


@pytest.mark.parametrize("stream", [False, True])
def test_slow_readers_pause_the_worker(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted, stream: bool
) -> None:
    for worker in fake_workers:
        worker.say(**{"text": "x" * MIB, "tokens": 60} if stream else {"size_bytes": 200 * MIB})
    before = gateway.resident_bytes()
    with ExitStack() as stack:
        clients = [
            stack.enter_context(RawClient(gateway.url, receive_buffer_bytes=8192)) for _ in range(4)
        ]
        for i, client in enumerate(clients):
            client.send("POST", CHAT, json.dumps(chat(f"{i}", stream=stream)).encode())
            next(client.read_pieces(client.read_head()))
        until("the workers stand still", lambda: stand_still(fake_workers), 10)
        sent = [r.answer_bytes for worker in fake_workers for r in worker.inference]
        assert len(sent) == 4
        assert max(sent) < 32 * MIB  # what the kernel's buffers hold
        assert gateway.resident_bytes() - before < 64 * MIB
        quick = exchange(gateway.url, CHAT, chat("quick"), headers=scripted(tokens=1))
        assert quick.status == 200
    counted.is_(client_gone=4, ok=1)


def stand_still(workers: list[FakeWorker]) -> bool:
    """No byte was written in a tenth of a second."""

    def written() -> list[int]:
        return [r.answer_bytes for worker in workers for r in worker.inference]

    before, started = written(), time.monotonic()
    until("a moment", lambda: time.monotonic() - started > 0.1)
    return written() == before


def test_big_answer_arrives_whole(gateway: GatewayProcess, fake_workers: list[FakeWorker]) -> None:
    size = 64 * MIB
    with RawClient(gateway.url, 30) as client:
        client.send("POST", CHAT, json.dumps(chat()).encode(), scripted(size_bytes=size))
        answer = client.read_head()
        assert answer.header("content-length") == str(size)
        assert sum(map(len, client.read_pieces(answer))) == size


@pytest.mark.parametrize("mebibytes", [1, 10, 31])
def test_c28_big_bodies_pass_by_default(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], mebibytes: int
) -> None:
    image = "data:image/png;base64," + "A" * (mebibytes * MIB)
    parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "what?"}]
    body = chat(messages=[{"role": "user", "content": parts}])
    answer = exchange(gateway.url, CHAT, body, seconds=30)
    assert answer.status == 200
    wait_only(fake_workers)
