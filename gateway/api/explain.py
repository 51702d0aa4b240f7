"""``POST /route/explain``: how a request would be placed now, without sending it."""

from __future__ import annotations

from dataclasses import asdict
from time import monotonic
from typing import Any

from gateway.api import errors, wire
from gateway.api.deps import Deps
from gateway.core.explain import explain
from gateway.core.request import Request


async def explained(deps: Deps, body: bytes) -> dict[str, Any]:
    """``body``: that of a chat or text completion, told apart by its ``messages``. Raises ApiError
    (400) for what is no JSON object."""
    call = wire.parse_call(body)
    if not call.parsed:
        raise errors.for_status(400, "the body is not a JSON object")
    fields = call.fields
    other = "responses" if "input" in fields else "completions"
    endpoint = "chat" if "messages" in fields else other
    reading = await deps.prompts.read(endpoint, call.fields)
    request = Request(reading.prompt, call.model, call.max_tokens, call.stream)
    answer = asdict(explain(deps.router, request, monotonic()))
    answer["fallback"] = reading.fallback
    return answer
