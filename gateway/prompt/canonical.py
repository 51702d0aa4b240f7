"""Bytes in the place of tokens: equal for equal prompts, and sharing a prefix where prompts do."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import orjson

_TEXT_TYPES = frozenset(("text", "input_text", "output_text", "refusal", "thinking"))


def canonical(endpoint: str, fields: dict[str, Any]) -> bytes | None:
    """The prompt's bytes, None if there are none. Tools come first, as templates render them; a
    picture or a sound is its digest at its place: its own bytes are no measure of its tokens."""
    prompt = fields.get("prompt")
    if endpoint == "completions" and isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    try:
        parts = prompt if endpoint == "completions" else _conversation(fields)
        return orjson.dumps(parts) if parts else None
    except orjson.JSONEncodeError:  # nested deeper than it writes
        return None


def _conversation(fields: dict[str, Any]) -> list[Any]:
    names = ("tools", "instructions", "system", "previous_response_id", "messages", "input")
    return [_with_digests(fields[name]) for name in names if fields.get(name)]


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
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind in _TEXT_TYPES:
        return part
    if kind in ("tool_use", "tool_result", "tool_reference"):
        return _message(part)
    whole = orjson.dumps(part, option=orjson.OPT_SORT_KEYS)
    return {"type": kind, "digest": blake2b(whole, digest_size=16).hexdigest()}
