"""Errors as OpenAI's clients and Anthropic's expect them, mapped once, here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.core.router import NoWorker
from gateway.upstream.errors import ConnectFailed, HeadTimeout, IdleTimeout, UpstreamError


@dataclass(slots=True)
class ApiError(Exception):
    """An answer that the gateway gives itself. ``kind`` is OpenAI's ``type``; ``told`` is the
    worker's own ``error``, where it is told in our words."""

    status: int
    kind: str
    message: str
    code: str | None = None
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    told: dict[str, Any] | None = None


def openai_body(error: ApiError) -> bytes:
    said = {"message": error.message, "type": error.kind, "param": None, "code": error.code}
    return orjson.dumps({"error": error.told or said})


_ANTHROPIC_KINDS = {
    404: "not_found_error", 413: "request_too_large", 503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip


def anthropic_body(error: ApiError) -> bytes:
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    said = {"type": _ANTHROPIC_KINDS.get(error.status, kind), "message": error.message}
    return orjson.dumps({"type": "error", "error": said})


_KINDS = {
    400: ("invalid_request_error", None),
    404: ("invalid_request_error", "not_found"),
    431: ("invalid_request_error", "head_too_large"),
    405: ("invalid_request_error", "method_not_allowed"),
    503: ("service_unavailable_error", "no_worker_ready"),
}


def for_status(status: int, message: str) -> ApiError:
    """An error that the routing of paths raised."""
    kind, code = _KINDS.get(
        status, ("invalid_request_error" if status < 500 else "api_error", None)
    )
    return ApiError(status, kind, message, code)


def body_too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        413,
        "invalid_request_error",
        f"the request body exceeds the limit of {limit_bytes} bytes (max_body_bytes)",
        "request_too_large",
        # What is left of the body is not read, so the connection cannot carry another request.
        [(b"connection", b"close")],
    )


def no_worker(error: NoWorker, retry_seconds: int) -> ApiError:
    reasons = "; ".join(f"worker {worker}: {why}" for worker, why in error.reasons.items())
    return ApiError(
        503,
        "service_unavailable_error",
        f"no worker is ready ({reasons or 'none is configured'})",
        "no_worker_ready",
        [(b"retry-after", str(retry_seconds).encode())],
    )


def stopping() -> ApiError:
    return ApiError(
        503,
        "service_unavailable_error",
        "the gateway is stopping",
        "stopping",
        [(b"retry-after", b"5"), (b"connection", b"close")],
    )


def told_by_worker(status: int, body: bytes) -> ApiError:
    """A worker's own error, for a stream whose head is out already."""
    try:
        error = orjson.loads(body)["error"]
        if isinstance(error, dict):
            message = error.get("message")
            return ApiError(status, "api_error", str(message or error), told=error)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        pass
    text = body.decode(errors="replace").strip()[:2000] or f"the worker answers {status}"
    return ApiError(status, "api_error", text)


def upstream_failed(error: UpstreamError) -> ApiError:
    """Before the head was sent: a status of our own. 504 and 502 tell a limit from a failure."""
    if isinstance(error, (HeadTimeout, IdleTimeout)):
        return ApiError(
            504, "timeout_error", f"the worker did not answer: {error}", "worker_timeout"
        )
    code = "worker_unreachable" if isinstance(error, ConnectFailed) else "worker_failed"
    return ApiError(502, "api_error", f"the worker failed: {error}", code)
