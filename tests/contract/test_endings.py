"""Ways an exchange ends other than well: each told to the client as it is, and counted once."""

from __future__ import annotations

import json
import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest

from tests.bodies import CHAT, COMPLETIONS, chat, completion, scripted
from tests.contract.expect import (
    Counted,
    assert_in_band_error,
    assert_openai_error,
    only,
    wait_only,
)
from tests.fake_worker import FakeWorker
from tests.gateway_process import GatewayProcess
from tests.raw_http import RawClient, exchange
from tests.waiting import until

LEFT_SECONDS = 1.0  # within which a worker must know that its client has left


# --- the client leaves


@pytest.mark.parametrize("leave", ["close", "reset"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "phase",
    [
        {"hold": True},
        {"gates": {"body": "never"}},
        {"gates": {"3": "never"}},
        {"tokens": 60, "gap_seconds": 0.05},
    ],
    ids=["before-head", "before-first-byte", "mid-stream", "between-chunks"],
)
def test_c01_c02_worker_is_freed_when_the_client_leaves(
    gateway: GatewayProcess,
    fake_workers: list[FakeWorker],
    counted: Counted,
    phase: dict[str, Any],
    stream: bool,
    leave: str,
) -> None:
    if not stream and phase.keys() != {"hold"}:
        phase = {"gates": {"body": "never"}, "size_bytes": 1000}
    with RawClient(gateway.url) as client:
        body = chat(stream=stream, max_tokens=50)
        client.send("POST", CHAT, json.dumps(body).encode(), scripted(**phase))
        worker, request = wait_only(fake_workers)
        if stream and phase.get("gates") == {"3": "never"}:
            client.read_events(client.read_head(), 3)
        elif stream and "gap_seconds" in phase:
            client.read_events(client.read_head(), 1)
        left_at = time.monotonic()
        getattr(client, leave)()
    assert worker.wait_peer_closed(request) - left_at < LEFT_SECONDS
    worker.wait("running is 0", lambda: worker.engine.running == 0)
    counted.is_(client_gone=1)


def test_c02_a_short_request_is_not_delayed_by_one_that_left(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted
) -> None:
    with RawClient(gateway.url) as client:
        body = json.dumps(chat("a long prompt " * 20_000, stream=True)).encode()
        client.send("POST", CHAT, body, scripted(hold=True))
        worker, request = wait_only(fake_workers)
    worker.wait_peer_closed(request)
    assert exchange(gateway.url, CHAT, chat("short"), seconds=2).status == 200
    counted.is_(client_gone=1, ok=1)


def test_c01_client_that_leaves_while_it_sends_reaches_no_worker(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted
) -> None:
    with RawClient(gateway.url) as client:
        client.send_bytes(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
        )
    counted.is_(client_gone=1)
    assert not any(worker.inference for worker in fake_workers)


def test_c01_client_that_leaves_a_big_answer_unread(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted
) -> None:
    with RawClient(gateway.url, receive_buffer_bytes=8192) as client:
        client.send("POST", CHAT, json.dumps(chat()).encode(), scripted(size_bytes=200_000_000))
        answer = client.read_head()
        next(client.read_pieces(answer))
        worker, request = wait_only(fake_workers)
        left_at = time.monotonic()
    assert worker.wait_peer_closed(request) - left_at < LEFT_SECONDS
    counted.is_(client_gone=1)


def test_client_that_leaves_after_the_last_byte_is_no_loss(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted
) -> None:
    for stream in (False, True):
        with RawClient(gateway.url) as client:
            client.send("POST", CHAT, json.dumps(chat(stream=stream)).encode())
            client.read()
            client.reset()
    counted.is_(ok=2)


# --- the worker breaks off


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("cut", ["rst", "fin", "clean"])
@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("asked", [False, True])
def test_c04_truncated_stream_is_told_in_band(
    gateway: GatewayProcess,
    fake_workers: list[FakeWorker],
    counted: Counted,
    path: str,
    cut: str,
    after: int,
    asked: bool,
) -> None:
    make = chat if path == CHAT else completion
    body = make(stream=True, stream_options={"include_usage": asked})
    gated = scripted(cut=cut, cut_after=after, gates={str(after - 1): "last"})
    with RawClient(gateway.url) as client:
        client.send("POST", path, json.dumps(body).encode(), gated)
        answer = client.read_head()
        client.read_events(answer, after - 1)
        for worker in fake_workers:
            worker.open_gate("last")
        for _ in client.read_pieces(answer):
            pass
    assert answer.status == 200
    assert_in_band_error(answer)
    said = bytes(only(fake_workers).answer)
    whole = b"".join(answer.events()[:-1])
    assert whole == said if cut != "rst" else said.startswith(whole)
    counted.is_(upstream_truncated=1)


@pytest.mark.parametrize("cut", ["rst", "fin", "clean"])
@pytest.mark.parametrize("inside", [1, 6, 30, 130])
def test_c04_cut_inside_an_event_leaves_the_error_an_event_of_its_own(
    gateway: GatewayProcess,
    fake_workers: list[FakeWorker],
    counted: Counted,
    cut: str,
    inside: int,
) -> None:
    script = scripted(cut=cut, cut_after=2, cut_inside=inside)
    answer = exchange(gateway.url, CHAT, chat(stream=True), headers=script)
    assert_in_band_error(answer)
    counted.is_(upstream_truncated=1)


@pytest.mark.parametrize("cut", ["rst", "fin", "clean"])
def test_c04_cut_between_head_and_first_event(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted, cut: str
) -> None:
    script = scripted(cut=cut, cut_after=0)
    answer = exchange(gateway.url, CHAT, chat(stream=True), headers=script)
    if answer.status == 200:
        assert_in_band_error(answer)
        counted.is_(upstream_truncated=1)
    else:  # the worker's RST overtook its head
        assert_openai_error(answer, 502)
        counted.is_(upstream_error=1)
    only(fake_workers)


@pytest.mark.parametrize("how", [{}, {"rechunk_bytes": 5}], ids=["whole", "pieces"])
@pytest.mark.parametrize("stream", [False, True])
def test_c04_vllm_stopped_by_sigterm_ends_with_abort(
    gateway: GatewayProcess,
    fake_workers: list[FakeWorker],
    counted: Counted,
    stream: bool,
    how: dict[str, Any],
) -> None:
    script = scripted(finish_reason="abort", **how)
    answer = exchange(gateway.url, CHAT, chat(stream=stream), headers=script)
    assert b'"finish_reason":"abort"' in answer.body
    assert answer.body.endswith(b"data: [DONE]\n\n") == stream
    counted.is_(upstream_truncated=1)


@pytest.mark.parametrize("how", [{}, {"rechunk_bytes": 5}], ids=["events", "pieces"])
def test_c04_vllm_whose_engine_dies_ends_with_an_error_event_and_done(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted, how: dict[str, Any]
) -> None:
    script = scripted(error_event=True, **how)
    answer = exchange(gateway.url, CHAT, chat(stream=True), headers=script)
    assert answer.body == bytes(only(fake_workers).answer)
    assert b"EngineCore died" in answer.body
    assert (answer.data()[-1], answer.end) == ("[DONE]", "complete")
    counted.is_(upstream_truncated=1)


@pytest.mark.parametrize("cut", ["rst", "fin"])
@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("size", [1000, 5_000_000], ids=["small", "big"])
def test_c04_plain_answer_cut_in_the_middle(
    gateway: GatewayProcess,
    fake_workers: list[FakeWorker],
    counted: Counted,
    cut: str,
    framing: str,
    size: int,
) -> None:
    script = scripted(cut=cut, cut_after=size // 2, size_bytes=size, framing=framing)
    answer = exchange(gateway.url, CHAT, chat(), headers=script)
    if answer.status == 200:
        assert answer.end == "cut"
        assert len(answer.body) <= size // 2
        assert b"error" not in answer.body
    else:
        assert_openai_error(answer, 502)
    only(fake_workers)
    counted.is_(upstream_truncated=1)


@pytest.mark.parametrize("cut", ["rst", "fin"])
@pytest.mark.parametrize("stream", [False, True])
def test_c43_worker_that_dies_before_its_head_is_a_502_and_no_replay(
    gateway: GatewayProcess,
    fake_workers: list[FakeWorker],
    counted: Counted,
    cut: str,
    stream: bool,
) -> None:
    for worker in fake_workers:
        worker.say(cut=cut)
    until("no idle connection", lambda: not idle_connections(gateway), 8)
    answer = exchange(gateway.url, CHAT, chat(stream=stream))
    assert_openai_error(answer, 502)
    only(fake_workers)
    counted.is_(upstream_error=1)


def idle_connections(gateway: GatewayProcess) -> float:
    return gateway.total("gateway_upstream_connections", state="idle")


@pytest.mark.parametrize("cut", ["rst", "fin"])
def test_c43_stale_idle_connection_is_replaced_once(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted, cut: str
) -> None:
    """The one case that is sent again: a reused connection that died before any answer byte."""
    document = "warm " * 200
    first = exchange(gateway.url, CHAT, chat(document))
    worker = fake_workers[int(first.header("x-gateway-worker") or "-1")]
    worker.say_once(cut=cut)
    again = exchange(gateway.url, CHAT, chat(document))
    assert (again.status, again.header("x-gateway-worker")) == (
        200,
        first.header("x-gateway-worker"),
    )
    assert len(worker.inference) == 3
    assert worker.inference[1].connection != worker.inference[2].connection
    counted.is_(ok=2)


def test_c43_stale_connection_that_dies_again_is_not_sent_a_third_time(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted
) -> None:
    document = "warmer " * 200
    first = exchange(gateway.url, CHAT, chat(document))
    worker = fake_workers[int(first.header("x-gateway-worker") or "-1")]
    worker.say_once(cut="fin")
    worker.say_once(cut="fin")
    again = exchange(gateway.url, CHAT, chat(document))
    assert again.status == 502
    assert len(worker.inference) == 3
    counted.is_(ok=1, upstream_error=1)


def test_worker_that_closes_its_idle_connections_is_never_noticed(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted
) -> None:
    for worker in fake_workers:
        worker.say(drop_idle=True)
    for i in range(20):
        assert exchange(gateway.url, CHAT, chat(f"{i}", stream=bool(i % 2))).status == 200
    counted.is_(ok=20)


# --- all together


def test_c09_accounts_are_even_after_a_mix_of_ends(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted
) -> None:
    before_byte = scripted(hold=True)
    mid_stream = scripted(gates={"2": "never"})
    broken = scripted(status=500)
    with ExitStack() as stack:
        clients: dict[str, list[RawClient]] = {"hold": [], "stream": [], "broken": [], "ok": []}
        for i in range(50):
            for kind, script in (
                ("hold", before_byte),
                ("stream", mid_stream),
                ("broken", broken),
                ("ok", []),
            ):
                client = stack.enter_context(RawClient(gateway.url))
                clients[kind].append(client)
                body = chat(f"{i}", stream=kind == "stream" or bool(i % 2))
                client.send("POST", CHAT, json.dumps(body).encode(), script)
        until("all arrived", lambda: sum(len(w.inference) for w in fake_workers) == 200, 10)
        for client in clients["stream"]:
            client.read_events(client.read_head(), 1)
        for client in clients["ok"]:
            assert client.read().status == 200
        for client in clients["broken"]:
            assert client.read().status == 500
        for i, client in enumerate(clients["hold"] + clients["stream"]):
            client.reset() if i % 2 else client.close()
    counted.is_(client_gone=100, upstream_error=50, ok=50)
    until("no worker works on", lambda: not any(w.engine.running for w in fake_workers))


def test_c09_many_cancelled_at_random_moments(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    """Twenty clients at a time that leave after some bytes of the answer, or none."""
    total = gateway.total("gateway_requests_total")
    body = json.dumps(chat(stream=True, max_tokens=40)).encode()

    def leave_after(pieces: int) -> None:
        with RawClient(gateway.url) as client:
            client.send("POST", CHAT, body, scripted(gap_seconds=0.001))
            if pieces:
                answer = client.read_head()
                for _ in zip(range(pieces - 1), client.read_pieces(answer), strict=False):
                    pass

    def leave_often(first: int) -> None:
        for i in range(10):
            leave_after((first + i) % 12)

    threads = [threading.Thread(target=leave_often, args=(k,)) for k in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    until("all counted", lambda: gateway.total("gateway_requests_total") - total == 200, 5)
    assert exchange(gateway.url, CHAT, chat()).status == 200
