"""Limits: of a body, of the wait for a head, of silence; none on the whole of an answer."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.bodies import CHAT, COMPLETIONS, chat, scripted
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

LIMIT_BYTES = 1_000_000
GATEWAY_ARGS = [
    "--max-body-bytes",
    str(LIMIT_BYTES),
    "--head-seconds",
    "1",
    "--idle-seconds",
    "1",
]


# --- bodies


def body_of(size: int) -> bytes:
    shell = json.dumps(chat("")).encode()
    return shell.replace(b'""', b'"' + b"x" * (size - len(shell)) + b'"')


@pytest.mark.parametrize("size", [LIMIT_BYTES - 1, LIMIT_BYTES])
def test_c28_body_up_to_the_limit_passes(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], size: int
) -> None:
    raw = body_of(size)
    assert len(raw) == size
    assert exchange(gateway.url, CHAT, raw).status == 200
    assert only(fake_workers).body == raw


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_c28_announced_too_big_is_refused_before_it_is_sent(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted, path: str
) -> None:
    with RawClient(gateway.url) as client:
        client.send_bytes(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n{"
            % (path.encode(), LIMIT_BYTES + 1)
        )
        answer = client.read()
        assert str(LIMIT_BYTES) in assert_openai_error(answer, 413)["message"]
        assert client.closed_by_peer()
    counted.is_(refused=1)
    assert not any(worker.inference for worker in fake_workers)
    assert "413" in gateway.log() or "exceeds" in gateway.log()


def test_c28_chunked_too_big_is_refused_when_it_is(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted
) -> None:
    piece = b"x" * 65536
    with RawClient(gateway.url) as client:
        client.send_bytes(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(LIMIT_BYTES // len(piece) + 1):
            client.send_bytes(b"%x\r\n%b\r\n" % (len(piece), piece))
        answer = client.read()
    assert answer.status == 413
    counted.is_(refused=1)
    assert not any(worker.inference for worker in fake_workers)


def test_c28_sdk_that_sends_all_before_it_reads_sees_the_413(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    """What httpx and requests do: the answer must not be lost to a reset."""
    answer = exchange(gateway.url, CHAT, body_of(3 * LIMIT_BYTES))
    assert answer.status == 413


# --- time


@pytest.mark.parametrize("stream", [False, True])
def test_c17_no_head_within_the_limit_is_a_504(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted, stream: bool
) -> None:
    started = time.monotonic()
    answer = exchange(gateway.url, CHAT, chat(stream=stream), headers=scripted(hold=True))
    assert_openai_error(answer, 504)
    assert 0.9 < time.monotonic() - started < 3
    worker, request = wait_only(fake_workers)
    worker.wait_peer_closed(request)
    counted.is_(timeout=1)


def test_c17_silence_mid_stream_is_told_in_band(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted
) -> None:
    script = scripted(gates={"3": "never"})
    answer = exchange(gateway.url, CHAT, chat(stream=True), headers=script)
    error = assert_in_band_error(answer)
    assert "1 s" in error["message"]
    assert len(answer.events()) == 4
    worker, request = wait_only(fake_workers)
    worker.wait_peer_closed(request)
    counted.is_(timeout=1)


def test_c17_silence_in_a_plain_answer_cuts_it(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted
) -> None:
    script = scripted(size_bytes=1000, gates={"body": "never"})
    answer = exchange(gateway.url, CHAT, chat(), headers=script)
    assert answer.status == 504 or answer.end == "cut"
    counted.is_(timeout=1)


def test_c23_no_limit_on_the_whole(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted
) -> None:
    started = time.monotonic()
    script = scripted(gap_seconds=0.3, tokens=12)
    answer = exchange(gateway.url, CHAT, chat(stream=True), headers=script)
    assert time.monotonic() - started > 4, "four times every limit"
    assert len(answer.data()) == 14, "role, tokens, [DONE]"
    assert (answer.data()[-1], answer.end) == ("[DONE]", "complete")
    counted.is_(ok=1)


def test_slow_reader_is_not_a_silent_worker(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted
) -> None:
    """A client that does not read for longer than the idle limit still gets all of its answer."""
    size = 30_000_000
    with RawClient(gateway.url, receive_buffer_bytes=8192) as client:
        client.send("POST", CHAT, json.dumps(chat()).encode(), scripted(size_bytes=size))
        answer = client.read_head()
        started = time.monotonic()
        until("the limit has passed", lambda: time.monotonic() - started > 1.5)
        got = sum(map(len, client.read_pieces(answer)))
    assert (got, answer.end) == (size, "complete")
    counted.is_(ok=1)


def test_c17_mute_worker_does_not_hold_up_the_other(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    fake_workers[0].set(mute=True)

    def ask(i: int) -> tuple[int, str | None, float]:
        started = time.monotonic()
        answer = exchange(gateway.url, CHAT, chat(f"{i} different", stream=bool(i % 2)))
        if answer.status != 200:
            assert_openai_error(answer, 504)
        return answer.status, answer.header("x-gateway-worker"), time.monotonic() - started

    with ThreadPoolExecutor(100) as pool:
        ends = list(pool.map(ask, range(100)))
    assert {status for status, _, _ in ends} == {200, 504}
    served = [seconds for status, worker, seconds in ends if status == 200]
    assert all(worker == "1" for status, worker, _ in ends if status == 200)
    assert len(served) >= 30
    assert sorted(served)[len(served) // 2] < 0.9

    def all_served() -> bool:
        return all(ask(i)[0] == 200 for i in range(4))

    until("the mute worker is out", all_served, 20)
