"""Bytes in the place of tokens: equal for equal prompts, and sharing a prefix where prompts do."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import orjson

_TEXT_TYPES = frozenset(("text", "input_text", "output_text", "refusal", "thinking"))


def canonical(endpoint: str, fields: dict[str, Any]) -> bytes | None:
    """The prompt's bytes, None if there are none. Tools come first, as templates render them; a
    picture or a sound is its digest at its place: its own bytes are no measure of its tokens."""
    if endpoint == "completions":
        parts: object = fields.get("prompt")
        if isinstance(parts, str):
            return parts.encode("utf-8", "surrogatepass")
    else:
        names = ("tools", "instructions", "system", "previous_response_id", "messages", "input")
        parts = [_with_digests(fields[name]) for name in names if fields.get(name)]
    try:
        return orjson.dumps(parts) if parts else None
    except orjson.JSONEncodeError:  # nested deeper than it writes
        return None


def _with_digests(value: Any) -> Any:
    """Messages with each part that is no text replaced by its digest."""
    if not isinstance(value, list):
        return value
    return [_message(item) if isinstance(item, dict) else item for item in value]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_part(part) for part in content]}


def _part(part: Any) -> Any:
    if not isinstance(part, dict) or "type" not in part or part["type"] in _TEXT_TYPES:
        return part
    if part["type"] in ("tool_use", "tool_result", "tool_reference"):
        return _message(part)
    whole = orjson.dumps(part, option=orjson.OPT_SORT_KEYS)
    return {"type": part["type"], "digest": blake2b(whole, digest_size=16).hexdigest()}
