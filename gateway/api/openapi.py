"""What ``/docs`` says of the proxied endpoints. The worker's own schema judges the body; only the
fields that people need to begin are described here."""

from __future__ import annotations

from typing import Any

DESCRIPTION = """
OpenAI-compatible gateway in front of vLLM servers. A request goes to the worker that has its
prompt's prefix cached, if that brings its first token soonest; bodies pass byte for byte.

Answers carry `x-gateway-worker`, `x-gateway-predicted-cached-tokens` and `x-request-id` (the
client's own, if it is made of up to 128 letters, digits, `.`, `_` and `-`). Errors of the gateway
itself have OpenAI's shape, on `/v1/messages` Anthropic's.
"""

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": "string", "nullable": True},
                "code": {"type": "string", "nullable": True},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["error"]},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_STATUSES = {
    "413": "The body exceeds `max_body_bytes`.",
    "502": "The worker failed before its answer began.",
    "503": "No worker is ready; `Retry-After` says when to come back.",
    "504": "The worker did not answer within `head_seconds`.",
}
_COMMON = {
    "model": {"type": "string", "description": "As in `GET /v1/models`."},
    "stream": {"type": "boolean", "default": False},
    "stream_options": {
        "type": "object",
        "description": "`include_usage`: end the stream with a usage event.",
        "properties": {"include_usage": {"type": "boolean"}},
    },
    "max_tokens": {"type": "integer", "minimum": 0},
    "temperature": {"type": "number"},
    "cache_salt": {
        "type": "string",
        "description": "Requests share cached prefixes only under equal salts.",
    },
}
_MESSAGES = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"role": {"type": "string"}, "content": {}},
        "required": ["role"],
    },
}
_INPUT = {"description": "Text, or a list of items.", "example": "Once upon a time"}
_PROMPT = {"description": "Text, token ids, or a list of either.", "example": "Once upon a time"}


ANY_PROMPT: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {"messages": _MESSAGES, "prompt": _PROMPT, **_COMMON},
                    "additionalProperties": True,
                }
            }
        },
    }
}
"""The body of ``/route/explain``: of either kind."""


def describe(schema: dict[str, Any]) -> dict[str, Any]:
    """Add the proxied endpoints to the schema that FastAPI made of the others."""
    paths = schema.setdefault("paths", {})
    paths["/v1/chat/completions"] = {
        "post": _operation("Chat completion", "messages", _MESSAGES, "chat.completion")
    }
    paths["/v1/completions"] = {
        "post": _operation("Text completion", "prompt", _PROMPT, "text_completion")
    }
    paths["/v1/responses"] = {"post": _operation("Response", "input", _INPUT, "response")}
    messages = _operation("Message", "messages", _MESSAGES, "message", _ANTHROPIC_ERROR)
    paths["/v1/messages"] = {"post": {**messages, "tags": ["Anthropic"]}}
    return schema


def _operation(
    summary: str, field: str, shape: dict[str, Any], kind: str, error: dict[str, Any] = _ERROR
) -> dict[str, Any]:
    body = {
        "type": "object",
        "properties": {field: shape, **_COMMON},
        "required": ["model", field],
        "additionalProperties": True,
    }
    answer = {
        "description": f"`{kind}`, or with `stream` an event stream of its chunks.",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": {"type": "string"}},
        },
    }
    errors = {
        status: {"description": text, "content": {"application/json": {"schema": error}}}
        for status, text in _STATUSES.items()
    }
    return {
        "summary": summary,
        "tags": ["OpenAI"],
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": answer, **errors},
    }
