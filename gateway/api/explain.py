"""``POST /route/explain``: how a request would be placed now, without sending it."""

from __future__ import annotations

from dataclasses import asdict, replace
from time import monotonic
from typing import Any

import orjson

from gateway.api import errors, wire
from gateway.api.deps import Deps
from gateway.core.explain import explain
from gateway.core.request import Request
from gateway.core.router import Router

_MOST_IN_HEADER = 16
"""Workers told of in a header: the cheapest ones. Clients take heads of some kilobytes only."""


def in_header(router: Router, request: Request, now: float) -> bytes:
    """The placement's terms in one line of JSON; nothing is placed."""
    told = explain(router, request, now)
    cheapest = sorted(told.candidates, key=lambda one: one.cost_seconds)[:_MOST_IN_HEADER]
    return orjson.dumps(replace(told, candidates=cheapest))


async def explained(deps: Deps, headers: wire.Headers, body: bytes) -> dict[str, Any]:
    """``body``: that of a chat or text completion, told apart by its ``messages``. Raises ApiError
    (400) for what is no JSON object."""
    call = wire.parse_call(body)
    if not call.parsed:
        raise errors.for_status(400, "the body is not a JSON object")
    fields = call.fields
    other = "responses" if "input" in fields else "completions"
    endpoint = "chat" if "messages" in fields else other
    reading = await deps.prompts.read(endpoint, fields)
    session = wire.hints(headers, fields).session
    request = Request(reading.prompt, call.model, call.max_tokens, call.stream, session)
    answer = asdict(explain(deps.router, request, monotonic()))
    answer["fallback"] = reading.fallback
    return answer
