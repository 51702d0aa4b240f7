"""`/v1/messages` and `/v1/responses`: other answers, other ends of streams, other errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.bodies import MESSAGES, RESPONSES, chat, response, scripted
from tests.contract.expect import Counted, assert_openai_error, only
from tests.fake_worker import FakeWorker
from tests.gateway_process import GatewayProcess
from tests.raw_http import Answer, exchange
from tests.waiting import until

APIS = {MESSAGES: chat, RESPONSES: response}
each_api = pytest.mark.parametrize("path", APIS)
HEARTBEATS = ["--heartbeat-seconds", "0.2"]


def ask(gateway: GatewayProcess, path: str, script: dict[str, Any], **fields: Any) -> Answer:
    return exchange(gateway.url, path, APIS[path](**fields), headers=scripted(**script))


def anthropic_error(body: bytes) -> dict[str, Any]:
    told = json.loads(body)
    assert told.keys() == {"type", "error"} and told["type"] == "error"
    assert told["error"].keys() == {"type", "message"}
    return dict(told["error"])


@each_api
@pytest.mark.parametrize("how", [{}, {"split_bytes": 1}, {"rechunk_bytes": 7}, {"framing": "eof"}])
@pytest.mark.parametrize("stream", [False, True])
def test_answers_pass_byte_for_byte(
    gateway: GatewayProcess,
    fake_workers: list[FakeWorker],
    counted: Counted,
    path: str,
    stream: bool,
    how: dict[str, Any],
) -> None:
    answer = ask(gateway, path, how, stream=stream)
    assert (answer.status, answer.end) == (200, "complete")
    assert answer.body == bytes(only(fake_workers).answer)
    assert answer.header("x-gateway-worker") in ("0", "1")
    counted.is_(ok=1)


@each_api
@pytest.mark.parametrize("stream", [False, True])
def test_usage_is_read_from_them(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], path: str, stream: bool
) -> None:
    def totals() -> list[float]:
        names = ("prompt", "delivered_cached")
        return [gateway.total(f"gateway_{name}_tokens_total") for name in names]

    def told() -> list[float]:
        engines = [worker.engine for worker in fake_workers]
        return [sum(e.prompt_tokens for e in engines), sum(e.hits_tokens for e in engines)]

    before = [ours - theirs for ours, theirs in zip(totals(), told(), strict=True)]
    text = f"{path} {stream} " * 60
    fields = {"given": text} if path == RESPONSES else {"text": text}
    for _ in range(2):
        answer = ask(gateway, path, {"tokens": 3}, stream=stream, **fields)
    assert int(answer.header("x-gateway-predicted-cached-tokens") or 0) > 0
    until(
        "both are counted",
        lambda: [a - b for a, b in zip(totals(), told(), strict=True)] == before,
    )
    assert sum(worker.engine.hits_tokens for worker in fake_workers) > 0


@each_api
@pytest.mark.parametrize("cut", ["rst", "fin", "clean"])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_c04_a_stream_that_is_cut_says_so(
    gateway: GatewayProcess, counted: Counted, path: str, cut: str, after: int
) -> None:
    answer = ask(gateway, path, {"tokens": 8, "cut": cut, "cut_after": after}, stream=True)
    assert answer.end == "cut"
    last = answer.events()[-1]
    if path == MESSAGES:
        assert last.startswith(b"event: error\ndata: ")
        assert anthropic_error(last.split(b"data: ")[1])["type"] == "api_error"
    else:
        assert last.startswith(b'data: {"error":')
    assert b"message_stop" not in answer.body and b"response.completed" not in answer.body
    counted.is_(upstream_truncated=1)


@each_api
def test_a_stream_cut_inside_its_last_event_is_cut(
    gateway: GatewayProcess, counted: Counted, path: str
) -> None:
    number = 5 if path == MESSAGES else 2
    script = {"tokens": 1, "cut": "clean", "cut_after": number, "cut_inside": 40}
    assert ask(gateway, path, script, stream=True).end == "cut"
    counted.is_(upstream_truncated=1)


@each_api
def test_a_stream_that_the_worker_stopped_is_not_whole(
    gateway: GatewayProcess, counted: Counted, path: str
) -> None:
    answer = ask(gateway, path, {"finish_reason": "abort"}, stream=True)
    assert answer.end == "complete", "the worker ended it itself"
    counted.is_(upstream_truncated=1)


def test_a_worker_s_own_error_in_a_message_ends_it(
    gateway: GatewayProcess, counted: Counted
) -> None:
    answer = ask(gateway, MESSAGES, {"error_event": True}, stream=True)
    assert answer.end == "complete"
    assert answer.body.count(b"event: error") == 1
    counted.is_(upstream_truncated=1)


@each_api
@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
def test_a_worker_s_refusal_passes_as_it_is(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], path: str, status: int
) -> None:
    said = {"type": "error", "error": {"type": "x", "message": "m"}}
    answer = ask(gateway, path, {"status": status, "body": said}, stream=True)
    assert (answer.status, answer.json()) == (status, said)


@pytest.mark.parametrize("status", [400, 503])
def test_c60_a_late_refusal_has_the_endpoint_s_shape(
    start_gateway: Any, fake_workers: list[FakeWorker], status: int
) -> None:
    gateway = start_gateway(*HEARTBEATS, workers=[fake_workers[0].url])
    for path in APIS:
        answer = ask(gateway, path, {"status": status, "head_delay_seconds": 0.5}, stream=True)
        assert answer.status == 200 and b": ping\n\n" in answer.body
        last = answer.events()[-1]
        data = last.split(b"data: ")[1]
        if path == MESSAGES:
            assert last.startswith(b"event: error\n")
            assert anthropic_error(data)["message"] == f"scripted {status}"
        else:
            assert json.loads(data)["error"]["message"] == f"scripted {status}"


@each_api
def test_c60_no_worker(start_gateway: Any, path: str) -> None:
    gateway = start_gateway(workers=["http://127.0.0.1:1"], ready=503)
    answer = ask(gateway, path, {})
    assert answer.status == 503 and answer.header("retry-after")
    if path == MESSAGES:
        assert anthropic_error(answer.body)["type"] == "overloaded_error"
    else:
        assert_openai_error(answer, 503)


@each_api
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_c60_wrong_method(gateway: GatewayProcess, path: str, method: str) -> None:
    answer = exchange(gateway.url, path, method=method)
    assert (answer.status, answer.header("allow")) == (405, "POST")
    if path == MESSAGES:
        assert anthropic_error(answer.body)["type"] == "invalid_request_error"
    else:
        assert_openai_error(answer, 405)


@each_api
@pytest.mark.parametrize("raw", [b"{", b"[]", b'{"messages": {}}', b'{"input": 5}', b"{}"])
def test_c60_the_worker_judges_the_body(gateway: GatewayProcess, path: str, raw: bytes) -> None:
    answer = exchange(gateway.url, path, raw)
    assert answer.header("x-gateway-worker") in ("0", "1")
    assert answer.status != 502


def test_a_body_that_is_too_large(start_gateway: Any, fake_workers: list[FakeWorker]) -> None:
    gateway = start_gateway("--max-body-bytes", "1000", workers=[fake_workers[0].url])
    answer = exchange(gateway.url, MESSAGES, b"x" * 2000)
    assert answer.status == 413
    assert anthropic_error(answer.body)["type"] == "request_too_large"


def test_they_are_in_the_docs(gateway: GatewayProcess) -> None:
    paths = exchange(gateway.url, "/openapi.json").json()["paths"]
    assert {MESSAGES, RESPONSES} <= paths.keys()
