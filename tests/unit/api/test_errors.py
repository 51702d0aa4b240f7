from __future__ import annotations

import json

import pytest

from gateway.api import errors
from gateway.core.reservation import WorkerId
from gateway.core.router import NoWorker
from gateway.upstream.errors import (
    BadAnswer,
    ConnectFailed,
    HeadTimeout,
    IdleTimeout,
    NoAnswer,
    StaleConnection,
    Truncated,
    UpstreamError,
)


def said(error: errors.ApiError) -> dict[str, object]:
    body = json.loads(errors.openai_body(error))
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "invalid_request_error"),
        (405, "invalid_request_error"),
        (418, "invalid_request_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "service_unavailable_error"),
    ],
)
def test_a_status_has_its_type(status: int, kind: str) -> None:
    error = errors.for_status(status, "why")
    assert error.status == status
    assert (said(error)["type"], said(error)["message"]) == (kind, "why")


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (ConnectFailed("refused"), 502, "worker_unreachable"),
        (StaleConnection("closed"), 502, "worker_failed"),
        (NoAnswer("closed"), 502, "worker_failed"),
        (BadAnswer("noise"), 502, "worker_failed"),
        (Truncated("cut"), 502, "worker_failed"),
        (HeadTimeout("900 s"), 504, "worker_timeout"),
        (IdleTimeout("300 s"), 504, "worker_timeout"),
    ],
)
def test_a_failed_worker_is_told_from_a_limit(
    failure: UpstreamError, status: int, code: str
) -> None:
    error = errors.upstream_failed(failure)
    assert (error.status, said(error)["code"]) == (status, code)
    assert str(failure) in error.message


def test_no_worker_says_why_and_when_to_come_again() -> None:
    reasons = {WorkerId("0"): "starting", WorkerId("1"): "refused"}
    error = errors.no_worker(NoWorker(reasons), 5)
    assert error.status == 503
    assert "worker 0: starting; worker 1: refused" in error.message
    assert (b"retry-after", b"5") in error.headers
    assert "none is configured" in errors.no_worker(NoWorker({}), 5).message


def test_a_body_over_the_limit_names_it_and_ends_the_connection() -> None:
    error = errors.body_too_large(1000)
    assert error.status == 413
    assert "1000" in error.message and "max_body_bytes" in error.message
    assert (b"connection", b"close") in error.headers


def test_a_stopping_gateway_says_so() -> None:
    error = errors.stopping()
    assert error.status == 503
    assert b"retry-after" in dict(error.headers)


def test_any_text_is_json() -> None:
    assert said(errors.for_status(400, 'a "b"\n\0é'))["message"] == 'a "b"\n\0é'


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_anthropic_s_clients_get_their_own_shape(status: int, kind: str) -> None:
    body = json.loads(errors.anthropic_body(errors.for_status(status, "why")))
    assert body == {"type": "error", "error": {"type": kind, "message": "why"}}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"m","type":"t","code":400}}', "m"),
        (b'{"type":"error","error":{"type":"t","message":"m"}}', "m"),
        (b'{"error":{"type":"t"}}', "{'type': 't'}"),
        (b'{"error":"text"}', '{"error":"text"}'),
        (b"not JSON \xff", "not JSON \ufffd"),
        (b"", "the worker answers 418"),
    ],
)
def test_a_worker_s_own_error_is_told_again(body: bytes, message: str) -> None:
    error = errors.told_by_worker(418, body)
    told = json.loads(errors.openai_body(error))["error"]
    if b'"error":{' in body:
        assert told == json.loads(body)["error"]
    else:
        assert told["message"] == message
    anthropic = json.loads(errors.anthropic_body(error))["error"]
    assert anthropic == {"type": "invalid_request_error", "message": message}
