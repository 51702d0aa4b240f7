"""Bytes: the worker gets what the client sent, and the client gets what the worker said."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from tests.bodies import CHAT, COMPLETIONS, chat, completion, scripted
from tests.fake_worker import FakeWorker, Received
from tests.gateway_process import GatewayProcess
from tests.raw_http import TEST_ID_HEADER, RawClient, exchange

USAGE_EVENT = b'"choices":[]'


def received(workers: list[FakeWorker], count: int = 1) -> list[Received]:
    requests = [r for worker in workers for r in worker.inference]
    assert len(requests) == count
    return requests


def less_usage(body: bytes) -> bytes:
    events = [each + b"\n\n" for each in body.split(b"\n\n")[:-1]]
    return b"".join(each for each in events if USAGE_EVENT not in each)


# --- to the worker

BODIES = {
    "odd": '{ "messages":[ {"role":"user","content":"Ünïcödé 世界 🙂"} ],\n\t"min_p":1.0,'
    '"cache_salt":"s","priority":3,"return_token_ids":true,"model":"fake-model",'
    '"chat_template_kwargs":{"z":1,"a":[1e2,12345678901234567890]},"zz":{"b":null,"a":{}}}  \n',
    "escapes": '{"messages":[{"role":"user","content":"\\u00fc\\/\\ud83d\\ude42"}]}',
    "twice": '{"model":"fake-model","model":"fake-model","messages":[],"messages":[]}',
    "not-json": '{"model": fake-model',
    "nan": '{"model":"fake-model","messages":[],"temperature":NaN}',
    "empty": "",
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_c10_body_arrives_byte_for_byte(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], path: str, name: str
) -> None:
    raw = BODIES[name].encode()
    exchange(gateway.url, path, raw)
    (request,) = received(fake_workers)
    assert request.body == raw
    assert request.values("content-length") == [str(len(raw))]
    assert request.header("transfer-encoding") is None


@pytest.mark.parametrize(
    "raw", [b"\xff\xfe\x00", b"\x1f\x8b" + b"\0" * 50, bytes(range(256)) * 300]
)
def test_c10_any_bytes_are_forwarded_and_counted_unparsed(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], raw: bytes
) -> None:
    before = gateway.total("gateway_affinity_fallback_total", reason="unparsed")
    answer = exchange(gateway.url, CHAT, raw)
    assert answer.status == 400
    assert received(fake_workers)[0].body == raw
    assert gateway.total("gateway_affinity_fallback_total", reason="unparsed") == before + 1


def test_unparsed_bodies_are_placed_by_load(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    clients = [RawClient(gateway.url) for _ in range(8)]
    for client in clients:
        client.send("POST", CHAT, b"not json", scripted(status=400, gates={"head": "go"}))
    fake_workers[0].wait_inference(4)
    fake_workers[1].wait_inference(4)
    for worker in fake_workers:
        worker.open_gate("go")
    for client in clients:
        with client:
            assert client.read().status == 400


@pytest.mark.parametrize("pieces", [[1], [5, 1, 300], [100_000] * 5])
def test_chunked_request_body_arrives_with_its_length(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], pieces: list[int]
) -> None:
    raw = json.dumps(chat("x" * sum(pieces))).encode()
    framed, at = b"", 0
    for size in [*pieces, len(raw)]:
        piece = raw[at : at + size]
        at += len(piece)
        framed += b"%x;ext=1\r\n%b\r\n" % (len(piece), piece) if piece else b""
    with RawClient(gateway.url) as client:
        client.send_bytes(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\nTrailer: x-t\r\n\r\n" + framed + b"0\r\nx-t: 1\r\n\r\n"
        )
        assert client.read().status == 200
    (request,) = received(fake_workers)
    assert request.body == raw
    assert request.values("content-length") == [str(len(raw))]
    assert request.header("trailer") is None


def test_body_that_comes_byte_by_byte(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    raw = json.dumps(chat("slowly")).encode()
    with RawClient(gateway.url) as client:
        client.send_bytes(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
            % len(raw)
        )
        for at in range(len(raw)):
            client.send_bytes(raw[at : at + 1])
        assert client.read().status == 200
    assert received(fake_workers)[0].body == raw


def test_expect_100_continue_is_answered_here(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    raw = json.dumps(chat()).encode()
    with RawClient(gateway.url) as client:
        client.send_bytes(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
            b"Content-Length: %d\r\n\r\n" % len(raw)
        )
        assert client.read_interim() == 100
        client.send_bytes(raw)
        assert client.read().status == 200
    (request,) = received(fake_workers)
    assert request.header("expect") is None


def test_hop_by_hop_headers_stay_here(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    hops = {
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "1",
        "Keep-Alive": "timeout=5",
        "TE": "trailers",
        "Trailer": "x-t",
        "Proxy-Authorization": "Basic eDp5",
        "Proxy-Connection": "keep-alive",
    }
    ends = [
        ("Authorization", "Bearer key"),
        ("X-Multi", "1"),
        ("X-Multi", "2"),
        ("Cookie", "a=1; b=2"),
        ("Accept", "*/*"),
        ("User-Agent", "t/1"),
        ("X-Latin", "caf\xe9"),
    ]
    exchange(gateway.url, CHAT, chat(), headers=[*hops.items(), *ends])
    (request,) = received(fake_workers)
    assert [
        name for name in hops if request.header(name) is not None and name != "Connection"
    ] == []
    assert (request.header("connection") or "keep-alive") == "keep-alive"
    for name in {name for name, _ in ends}:
        assert request.values(name) == [v for n, v in ends if n == name]
    assert request.header(TEST_ID_HEADER)
    assert request.values("host") == [f"127.0.0.1:{request_port(request, fake_workers)}"]


def request_port(request: Received, workers: list[FakeWorker]) -> int:
    return next(worker.port for worker in workers if request in worker.inference)


def test_path_and_query_arrive_as_they_were(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    target = CHAT + "?api-version=1&x=%2F%20+&y"
    exchange(gateway.url, target, chat())
    assert received(fake_workers)[0].target == target


@pytest.mark.parametrize("sent", ["mine-1", "not sane", None])
def test_request_id_is_the_same_for_worker_and_client(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], sent: str | None
) -> None:
    headers = [("X-Request-Id", sent)] if sent else []
    answer = exchange(gateway.url, CHAT, chat(), headers=headers)
    (request,) = received(fake_workers)
    assert request.values("x-request-id") == [answer.header("x-request-id")]


def test_pipelined_requests_are_answered_in_order(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    with RawClient(gateway.url) as client:
        for tokens in (1, 2, 3):
            client.send("POST", CHAT, json.dumps(chat(max_tokens=tokens)).encode())
        counts = [client.read().json()["usage"]["completion_tokens"] for _ in range(3)]
    assert counts == [1, 2, 3]


def test_http_1_0_client_gets_all(gateway: GatewayProcess, fake_workers: list[FakeWorker]) -> None:
    raw = json.dumps(chat(stream=True)).encode()
    with RawClient(gateway.url) as client:
        client.send_bytes(
            b"POST %b HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(raw))
        )
        client.send_bytes(raw)
        answer = client.read()
    assert answer.body == less_usage(bytes(received(fake_workers)[0].answer))


# --- to the client


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"split_bytes": 1},
        {"split_bytes": 3},
        {"split_bytes": 100},
        {"rechunk_bytes": 1},
        {"rechunk_bytes": 2},
        {"rechunk_bytes": 7},
        {"rechunk_bytes": 300},
        {"rechunk_bytes": 100_000},
        {"framing": "eof"},
        {"framing": "eof", "http_version": "1.0"},
        {"trailers": [["x-t", "1"]]},
        {"close": True},
        {"informational": [103, 102]},
    ],
    ids=json.dumps,
)
def test_c58_stream_is_untouched_but_for_the_usage_nobody_asked_for(
    gateway: GatewayProcess,
    fake_workers: list[FakeWorker],
    path: str,
    asked: bool,
    how: dict[str, Any],
) -> None:
    make = chat if path == CHAT else completion
    more = {"stream_options": {"include_usage": True}} if asked else {}
    answer = exchange(gateway.url, path, make(stream=True, **more), headers=scripted(**how))
    said = bytes(received(fake_workers)[0].answer)
    assert said.count(USAGE_EVENT) == 1
    assert answer.body == (said if asked else less_usage(said))
    assert answer.end == "complete"
    assert answer.header("x-early") is None


def test_c58_every_split_of_the_usage_event(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    raw = json.dumps(chat(stream=True)).encode()
    said = b""
    with RawClient(gateway.url) as client:
        client.send("POST", CHAT, raw)
        client.read()
        whole = bytes(received(fake_workers)[0].answer)
        start = whole.rindex(b"\n\ndata: {") - 60
        for at in range(start, len(whole)):
            for worker in fake_workers:
                worker.reset()
            client.send("POST", CHAT, raw, scripted(rechunk_at=(at,)))
            answer = client.read()
            said = bytes(received(fake_workers)[0].answer)
            assert answer.body == less_usage(said), at
    assert said.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    "text",
    [
        '"choices":[]',
        '{"choices":[],"usage":{}}',
        "data: [DONE]\n\n",
        "\n\n",
        '"usage":{',
        "\r\n\r\n",
        "🙂é",
    ],
)
@pytest.mark.parametrize("how", [{}, {"rechunk_bytes": 5}], ids=["events", "pieces"])
def test_c58_text_that_looks_like_framing(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], text: str, how: dict[str, Any]
) -> None:
    answer = exchange(gateway.url, CHAT, chat(stream=True), headers=scripted(text=text, **how))
    assert "".join(e["choices"][0]["delta"]["content"] for e in answer.data()[:-1]) == text * 5
    assert len(answer.data()) == 7


@pytest.mark.parametrize("piece_bytes", [1, 5, 20, 1000])
def test_the_head_is_first_though_too_little_has_come_to_pass_on(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], piece_bytes: int
) -> None:
    how = {"head_with_body": True, "rechunk_bytes": piece_bytes, "gap_seconds": 0.001}
    for stream in (True, False):
        answer = exchange(gateway.url, CHAT, chat(stream=stream), headers=scripted(**how))
        assert answer.status == 200
        said = bytes(received(fake_workers)[-1].answer)
        assert answer.body == (less_usage(said) if stream else said)
        for worker in fake_workers:
            worker.reset()


ODD_STREAMS = {
    "comment": [": ping\n\n", 'data: {"choices":[{"index":0}]}\n\n', "data: [DONE]\n\n"],
    "no-usage-key": ['data: {"choices":[],"prompt_filter_results":[]}\n\n', "data: [DONE]\n\n"],
    "named": ['event: x\ndata: {"choices":[{"index":0}]}\n\n', "data: [DONE]\n\n"],
    "spaces": ['data:{"choices": [ {"index":0} ]}\n\n', "data: [DONE]\n\n"],
    "error": ['data: {"error":{"message":"m","code":500}}\n\n', "data: [DONE]\n\n"],
    "crlf": ['data: {"choices":[{"index":0}]}\r\n\r\n', "data: [DONE]\r\n\r\n"],
    "big": ['data: {"choices":[{"index":0,"x":"' + "y" * 300_000 + '"}]}\n\n', "data: [DONE]\n\n"],
    "big-before-choices": [
        'data: {"x":"' + "y" * 300_000 + '","choices":[]}\n\n',
        "data: [DONE]\n\n",
    ],
}


@pytest.mark.parametrize("name", ODD_STREAMS)
@pytest.mark.parametrize("how", [{}, {"rechunk_bytes": 4}], ids=["events", "pieces"])
def test_other_streams_pass_untouched(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], name: str, how: dict[str, Any]
) -> None:
    events = ODD_STREAMS[name]
    if how and len(events[0]) > 1000:
        how = {"rechunk_bytes": 1000}
    for worker in fake_workers:
        worker.say(events=events, **how)
    answer = exchange(gateway.url, CHAT, chat(stream=True))
    assert answer.body == "".join(events).encode()


@pytest.mark.parametrize("framing", ["length", "chunked", "eof"])
@pytest.mark.parametrize("how", [{}, {"split_bytes": 1}], ids=["whole", "bytes"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_plain_answer_is_untouched(
    gateway: GatewayProcess,
    fake_workers: list[FakeWorker],
    framing: str,
    how: dict[str, Any],
    path: str,
) -> None:
    make = chat if path == CHAT else completion
    answer = exchange(gateway.url, path, make(), headers=scripted(framing=framing, **how))
    assert answer.body == bytes(received(fake_workers)[0].answer)
    assert answer.end == "complete"
    if framing == "length":
        assert answer.header("content-length") == str(len(answer.body))


@pytest.mark.parametrize("stream", [False, True])
def test_content_encoding_of_the_worker_is_relayed_raw(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], stream: bool
) -> None:
    body = chat(stream=stream, stream_options={"include_usage": True} if stream else None)
    answer = exchange(gateway.url, CHAT, body, headers=scripted(content_encoding="gzip"))
    assert answer.header("content-encoding") == "gzip"
    assert answer.body == bytes(received(fake_workers)[0].answer)
    text = gzip.decompress(answer.body)
    assert text.endswith(b"data: [DONE]\n\n") if stream else json.loads(text)["choices"]


def test_c22_no_compression_of_ours(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    headers = [("Accept-Encoding", "gzip, br, zstd, deflate")]
    for stream in (False, True):
        answer = exchange(gateway.url, CHAT, chat("x" * 5000, stream=stream), headers=headers)
        assert answer.header("content-encoding") is None


def test_headers_of_the_answer(gateway: GatewayProcess, fake_workers: list[FakeWorker]) -> None:
    script = scripted(
        headers=[
            ["X-Multi", "1"],
            ["X-Multi", "2"],
            ["Set-Cookie", "a=1"],
            ["Set-Cookie", "b=2"],
            ["Connection", "x-hop"],
            ["X-Hop", "1"],
            ["Keep-Alive", "timeout=5"],
            ["X-Request-Id", "the workers"],
            ["X-Gateway-Worker", "77"],
            ["X-Latin", "caf\xe9"],
        ]
    )
    headers = [("X-Request-Id", "mine"), *script]
    answer = exchange(gateway.url, CHAT, chat(), headers=headers)
    assert [v for n, v in answer.headers if n == "x-multi"] == ["1", "2"]
    assert [v for n, v in answer.headers if n == "set-cookie"] == ["a=1", "b=2"]
    assert answer.header("x-hop") is None
    assert answer.header("keep-alive") is None
    assert answer.header("x-request-id") == "mine"
    assert answer.header("x-gateway-worker") in ("0", "1")
    assert answer.header("x-latin") == "caf\xe9"
    assert answer.header("date") and answer.header("server")


def test_event_stream_headers_replace_the_workers(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    script = scripted(headers=[["Cache-Control", "max-age=5"], ["X-Accel-Buffering", "yes"]])
    answer = exchange(gateway.url, CHAT, chat(stream=True), headers=script)
    assert answer.header("cache-control") == "no-cache"
    assert answer.header("x-accel-buffering") == "no"


ERRORS: list[dict[str, Any]] = [
    {"status": 400, "body": {"error": {"message": "m", "type": "t", "param": None, "code": 400}}},
    {"status": 404, "body": {"error": {"message": "no model"}}},
    {"status": 422, "body": "plain text, not JSON"},
    {"status": 429, "headers": [["retry-after", "7"]]},
    {"status": 500, "body": ""},
    {"status": 503, "headers": [["retry-after", "1"]], "body": {"error": {"message": "full"}}},
    {"status": 413, "framing": "chunked"},
    {"status": 400, "split_bytes": 1, "close": True},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", ERRORS, ids=lambda s: str(s["status"]))
def test_c05_the_workers_refusal_is_the_clients(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], script: dict[str, Any], stream: bool
) -> None:
    answer = exchange(gateway.url, CHAT, chat(stream=stream), headers=scripted(**script))
    requests = [r for worker in fake_workers for r in worker.inference]
    assert answer.status == script["status"]
    assert answer.body == bytes(requests[-1].answer)
    assert answer.end == "complete"
    if requests[-1].answer:
        assert answer.header("content-type") == "application/json"
    for name, value in script.get("headers", []):
        assert answer.header(name) == value


@pytest.mark.parametrize("status", [204, 304])
def test_answers_without_a_body(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], status: int
) -> None:
    with RawClient(gateway.url) as client:
        for _ in range(2):
            client.send("POST", CHAT, b"{}", scripted(status=status, body=""))
            answer = client.read()
            assert (answer.status, answer.body) == (status, b"")


@pytest.mark.parametrize(
    "instead",
    [
        "garbage\r\n\r\n",
        "",
        "HTTP/1.1 200 OK\r\ncontent-length: abc\r\n\r\n",
        "HTTP/1.1 200 OK\r\nx-long: " + "y" * 100_000 + "\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\n" + "x-many: 1\r\n" * 20_000 + "\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n",
        "HTTP/2 200\r\n\r\n",
    ],
    ids=["garbage", "nothing", "length", "long", "many", "101", "half-a-head", "http2"],
)
def test_an_answer_that_is_not_http_is_a_502(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], instead: str
) -> None:
    for worker in fake_workers:
        worker.say(instead=instead)
    before = gateway.total("gateway_requests_total", outcome="upstream_error")
    answer = exchange(gateway.url, CHAT, chat(stream=True))
    assert answer.status == 502
    assert answer.json()["error"]["message"]
    assert gateway.total("gateway_requests_total", outcome="upstream_error") == before + 1


def test_connections_to_the_worker_are_reused(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    for i in range(6):
        exchange(gateway.url, CHAT, chat("the same", stream=bool(i % 2)))
    requests = received(fake_workers, 6)
    used = {(request_port(r, fake_workers), r.connection) for r in requests}
    assert len(used) <= 2
