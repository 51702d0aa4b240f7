"""Clients of other habits: HTTP/1.0, pipelining, `Expect`, and heads without end."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.bodies import CHAT, chat, scripted
from tests.contract.expect import Counted, assert_openai_error, only, wait_only
from tests.contract.test_wire import less_usage, received
from tests.fake_worker import FakeWorker
from tests.gateway_process import GatewayProcess
from tests.raw_http import RawClient, exchange

GATEWAY_ARGS = ["--max-body-bytes", "1000000"]
MIB = 1024 * 1024
LEFT_SECONDS = 1.0  # within which a worker must know that its client has left


def head(*lines: str) -> bytes:
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode("latin-1")


# --- HTTP/1.0


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_has_no_chunks(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], stream: bool
) -> None:
    """The end of the connection is the end of what has no length."""
    raw = json.dumps(chat(stream=stream)).encode()
    with RawClient(gateway.url) as client:
        client.send_bytes(head(f"POST {CHAT} HTTP/1.0", f"Content-Length: {len(raw)}") + raw)
        answer = client.read()
        assert client.closed_by_peer()
    said = bytes(only(fake_workers).answer)
    assert answer.header("transfer-encoding") is None
    assert answer.body == (less_usage(said) if stream else said)
    assert answer.header("connection") == "close"


def test_c04_http_1_0_stream_that_is_cut_says_so(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted
) -> None:
    raw = json.dumps(chat(stream=True)).encode()
    for worker in fake_workers:
        worker.say(cut="fin", cut_after=3)
    with RawClient(gateway.url) as client:
        client.send_bytes(head(f"POST {CHAT} HTTP/1.0", f"Content-Length: {len(raw)}") + raw)
        answer = client.read()
    assert answer.body.count(b'data: {"error":') == 1
    assert b"[DONE]" not in answer.body
    counted.is_(upstream_truncated=1)


# --- several requests on their way at once


def test_pipelined_streams_and_plain_answers_come_in_order(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted
) -> None:
    kinds = [True, False, True, True, False]
    with RawClient(gateway.url) as client:
        for tokens, stream in enumerate(kinds, 1):
            body = chat(max_tokens=tokens, stream=stream)
            client.send("POST", CHAT, json.dumps(body).encode())
        answers = [client.read() for _ in kinds]
    for tokens, (answer, stream) in enumerate(zip(answers, kinds, strict=True), 1):
        assert answer.status == 200
        if stream:
            assert len(answer.data()) == tokens + 2, "role, tokens, [DONE]"
            assert answer.data()[-1] == "[DONE]"
        else:
            assert answer.json()["usage"]["completion_tokens"] == tokens
    received(fake_workers, len(kinds))
    counted.is_(ok=len(kinds))


def test_a_request_that_comes_while_a_stream_runs_waits_for_its_end(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    with RawClient(gateway.url) as client:
        first = json.dumps(chat(stream=True)).encode()
        client.send("POST", CHAT, first, scripted(gates={"2": "on"}))
        answer = client.read_head()
        client.read_events(answer, 2)
        client.send("POST", CHAT, json.dumps(chat(max_tokens=3)).encode())
        assert exchange(gateway.url, "/health").status == 200
        assert len([r for w in fake_workers for r in w.inference]) == 1
        for worker in fake_workers:
            worker.open_gate("on")
        for _ in client.read_pieces(answer):
            pass
        assert answer.data()[-1] == "[DONE]"
        assert client.read().json()["usage"]["completion_tokens"] == 3


PHASES: list[dict[str, Any]] = [{"hold": True}, {"gates": {"2": "never"}}]


@pytest.mark.parametrize("leave", ["close", "reset"])
@pytest.mark.parametrize("script", PHASES, ids=["before-head", "mid-stream"])
@pytest.mark.parametrize("late", [False, True], ids=["at-once", "later"])
def test_c01_c02_pipelining_client_that_leaves_frees_the_worker(
    gateway: GatewayProcess,
    fake_workers: list[FakeWorker],
    counted: Counted,
    script: dict[str, Any],
    leave: str,
    late: bool,
) -> None:
    """What it had sent on behind its first request is not even begun."""
    raw = json.dumps(chat(stream=True)).encode()
    with RawClient(gateway.url) as client:
        client.send("POST", CHAT, raw, scripted(**script))
        if late:
            wait_only(fake_workers)
        for _ in range(2):
            client.send("POST", CHAT, raw)
        worker, request = wait_only(fake_workers)
        if "gates" in script:
            client.read_events(client.read_head(), 1)
        left_at = time.monotonic()
        getattr(client, leave)()
    assert worker.wait_peer_closed(request) - left_at < LEFT_SECONDS
    counted.is_(client_gone=1)
    only(fake_workers)


# --- Expect


def test_c28_expect_with_a_body_too_big_is_told_before_it_is_sent(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted
) -> None:
    with RawClient(gateway.url) as client:
        client.send_bytes(
            head(
                f"POST {CHAT} HTTP/1.1",
                "Host: x",
                "Expect: 100-continue",
                "Content-Length: 1000001",
            )
        )
        answer = client.read()
        assert_openai_error(answer, 413)
        assert client.closed_by_peer()
    counted.is_(refused=1)
    assert not any(worker.inference for worker in fake_workers)


# --- heads


def refusal(client: RawClient, pieces: list[bytes]) -> int | None:
    """The status that comes when these are sent; None where a reset overtook it."""
    try:
        for piece in pieces:
            client.send_bytes(piece)
    except (BrokenPipeError, ConnectionResetError):
        pass
    try:
        answer = client.read_head()
    except (ConnectionResetError, EOFError):
        return None
    for _ in client.read_pieces(answer):
        pass
    assert client.closed_by_peer()
    return answer.status


@pytest.mark.parametrize(
    "pieces",
    [
        [b"POST /" + b"x" * (8 * MIB) + b" HTTP/1.1\r\nHost: x\r\n\r\n"],
        [b"GET /health?" + b"x" * (8 * MIB) + b" HTTP/1.1\r\nHost: x\r\n\r\n"],
        [b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"y" * (8 * MIB) + b"\r\n\r\n"],
        [b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"x-many: 1\r\n" * 500_000 + b"\r\n"],
        [b"GET /health HTTP/1.1\r\nHost: x\r\n", *[b"x: " + b"y" * MIB + b"\r\n"] * 16],
        [b"GET /", *[b"x" * MIB] * 16],
        [b"x" * MIB] * 16,
    ],
    ids=["path", "query", "header", "headers", "headers-without-end", "url-without-end", "method"],
)
def test_a_head_over_any_sane_limit_is_refused_without_being_kept(
    gateway: GatewayProcess, pieces: list[bytes]
) -> None:
    before = gateway.resident_bytes()
    with RawClient(gateway.url) as client:
        assert refusal(client, pieces) in (400, 414, 431, None)
    assert gateway.resident_bytes() - before < 8 * MIB
    assert exchange(gateway.url, "/health").status == 200


@pytest.mark.parametrize("size", [1000, 8_000, 30_000])
def test_a_head_of_a_sane_size_passes(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], size: int
) -> None:
    """Tokens of single sign-on are kilobytes long."""
    headers = [("Authorization", "Bearer " + "t" * size)]
    target = f"{CHAT}?x={'y' * size}"
    answer = exchange(gateway.url, target, chat(), headers=headers)
    assert answer.status == 200
    request = only(fake_workers)
    assert request.target == target
    assert request.header("authorization") == headers[0][1]


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n"
        b"Content-Length: 2\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nx: a\0b\r\n\r\n",
    ],
    ids=[
        "tls", "words", "version", "space", "negative", "two-lengths", "length-and-chunks", "chunk",
        "no-colon", "nul",
    ],
)  # fmt: skip
def test_what_is_not_http_is_refused_and_reaches_no_worker(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], data: bytes
) -> None:
    with RawClient(gateway.url) as client:
        client.send_bytes(data)
        assert client.read_head().status == 400
    assert not any(worker.inference for worker in fake_workers)
    assert exchange(gateway.url, "/health").status == 200
