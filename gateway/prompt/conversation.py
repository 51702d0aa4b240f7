"""A chat request's fields as the worker's template gets to see them.

What stands here is what vLLM's parser makes of a body before it renders (seen in 0.28 and 0.32):
which keys it drops, adds and reorders, since templates write whole objects as JSON. What it is not
known to do, or does differently by version, is not exact.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

_CHANGES_TEXT = (
    "chat_template",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "truncate_prompt_tokens",
)

_NOT_VARIABLES = frozenset((
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
))  # fmt: skip
"""What transformers takes for itself: as template variables they do something else, or fail."""

_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_DROPPED_PART_KEYS = frozenset((
    "audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil",
    "image_url", "input_audio", "name", "prompt_cache_breakpoint", "refusal", "text", "thinking",
    "type", "uuid", "video_embeds", "video_url",
))  # fmt: skip
_BILLING = "x-anthropic-billing-header"
"""Claude Code's line with a value that changes every time; newer vLLM drops it from system text."""

Parts = list[dict[str, Any]]


class NotExact(Exception):
    """Why this prompt's token ids are not known here; ``reason`` is a metric label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Conversation:
    """``messages`` have text, or a list of text parts, as ``content``. ``begins``: the answer's
    head is rendered; ``continues``: the last message is left open. ``unknown`` names variables
    whose value only the worker knows. ``features``: what is more than plain text, see
    ``gateway.prompt.trust``."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    begins: bool = True
    continues: bool = False
    special: bool = False
    unknown: tuple[str, ...] = ()
    features: frozenset[str] = frozenset()


def read_conversation(fields: dict[str, Any], drops_tools: bool) -> Conversation:
    """``fields`` of a chat completion; ``drops_tools``: the worker leaves tools out where
    ``tool_choice`` is none. Raises NotExact."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise NotExact("no_prompt")
    if any(fields.get(name) is not None for name in _CHANGES_TEXT):
        raise NotExact("option")
    transfer = fields.get("kv_transfer_params")
    if transfer is not None and isinstance(transfer, dict) and "prompt_token_ids" in transfer:
        raise NotExact("option")
    features: set[str] = set()
    begins = fields.get("add_generation_prompt", True) is not False
    continues = fields.get("continue_final_message", False) is True
    special = fields.get("add_special_tokens", False) is True
    if continues:
        if begins:  # the worker refuses both
            raise NotExact("option")
        features.add("continue")
    if special:
        features.add("special")
    return Conversation(
        [_message(message, features) for message in messages],
        read_tools(fields, features, drops_tools) if fields.get("tools") is not None else None,
        variables(fields, features),
        begins,
        continues,
        special,
        features=frozenset(features) if features else _NO_FEATURES,
    )


_NO_FEATURES: frozenset[str] = frozenset()


def _message(message: object, features: set[str]) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise NotExact("not_text")
    content = message.get("content")
    if not isinstance(content, str):
        content = _parts(content, features)
    if role == "system":
        content = _without_billing(content, features)
    read: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        _add_assistant(read, message, features)
    elif role == "tool":
        features.add("tool_calls")
        if "tool_call_id" in message:
            read["tool_call_id"] = message["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(value := message.get(name), str):
            read[name] = value
    if role == "developer":
        features.add("developer")
        if message.get("tools") is not None:
            raise NotExact("option")
        read["tools"] = None
    return read


def _parts(content: object, features: set[str]) -> Parts:
    """Text parts of a list; of None there are none."""
    if content is None:
        return []
    if not isinstance(content, list):
        raise NotExact("not_text")
    features.add("parts")
    found: Parts = []
    for part in content:
        if isinstance(part, str):
            found.append({"type": "text", "text": part})
            continue
        key = _TEXT_KEYS.get(str(part.get("type"))) if isinstance(part, dict) else None
        if key is None:
            raise NotExact("not_text")
        if (text := part.get(key)) is None and part["type"] in ("text", "refusal"):
            continue
        if not isinstance(text, str) or (part["type"] != "text" and text.startswith(_BILLING)):
            raise NotExact("not_text")
        more = {name: value for name, value in part.items() if name not in _DROPPED_PART_KEYS}
        if more:
            features.add("extras")
        found.append({"type": "text", "text": text, **more})
    return found


def _without_billing(content: str | Parts, features: set[str]) -> str | Parts:
    if isinstance(content, str):
        if not content.startswith(_BILLING):
            return content
        features.add("billing")
        return content.partition("\n")[2] or []
    if not any(part["text"].startswith(_BILLING) for part in content):
        return content
    features.add("billing")
    kept = []
    for part in content:
        if not part["text"].startswith(_BILLING):
            kept.append(part)
        elif rest := part["text"].partition("\n")[2]:
            kept.append({**part, "text": rest})
    return kept


def _add_assistant(read: dict[str, Any], message: dict[str, Any], features: set[str]) -> None:
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise NotExact("not_text")
        features.add("tool_calls")
        read["tool_calls"] = [_tool_call(call, features) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise NotExact("not_text")
        features.add("reasoning")
        read["reasoning"] = read["reasoning_content"] = reasoning


def _tool_call(call: object, features: set[str]) -> dict[str, Any]:
    """In the order of the parser's own fields, unknown ones behind them."""
    if not isinstance(call, dict) or call.get("type") != "function":
        raise NotExact("not_text")
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(call.get("id"), str):
        raise NotExact("not_text")
    if not isinstance(function.get("name"), str):
        raise NotExact("not_text")
    inner = {"arguments": call_arguments(function.get("arguments")), "name": function["name"]}
    inner_more = {name: value for name, value in function.items() if name not in inner}
    made = {"id": call["id"], "function": inner | inner_more, "type": "function"}
    more = {name: value for name, value in call.items() if name not in made}
    if more or inner_more:
        features.add("extras")
    return made | more


def call_arguments(arguments: object) -> dict[str, Any]:
    """The object that a tool call's JSON text is; what is no object is read by no fixed rule."""
    if not isinstance(arguments, str):
        raise NotExact("not_text")
    try:
        read = json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        raise NotExact("not_text") from None
    if not isinstance(read, dict):
        raise NotExact("not_text")
    return read


def read_tools(
    fields: dict[str, Any], features: set[str], drops_tools: bool
) -> list[dict[str, Any]] | None:
    """``fields["tools"]``, which is there, as the parser writes them out again."""
    if fields.get("tool_choice") == "none":
        features.add("no_tool_choice")
        if drops_tools:
            return None
    tools = fields["tools"]
    if not isinstance(tools, list):
        raise NotExact("option")
    features.add("tools")
    return [_tool(tool, features) for tool in tools]


_TOOL_FIELDS: tuple[tuple[str, type], ...] = (("description", str), ("parameters", dict))
_TOOL_FLAGS = ("strict", "defer_loading")


def _tool(tool: object, features: set[str]) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise NotExact("option")
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise NotExact("option")
    made: dict[str, Any] = {"name": function["name"]}
    for name, kind in _TOOL_FIELDS:
        value = function.get(name)
        if value is not None and not isinstance(value, kind):
            raise NotExact("option")
        made[name] = value
    deferred = tool.get("defer_loading")
    if deferred is not None and not isinstance(deferred, bool):
        raise NotExact("option")
    flags = {name: function.get(name) for name in _TOOL_FLAGS}
    if flags["defer_loading"] is None:
        flags["defer_loading"] = deferred
    for name, value in flags.items():
        if value is not None:
            if not isinstance(value, bool):
                raise NotExact("option")
            made[name] = value
            features.add("extras")
    whole = {"type": "function", "function": made}
    return whole if deferred is None else {**whole, "defer_loading": deferred}


def variables(fields: dict[str, Any], features: set[str]) -> dict[str, Any]:
    """What the template sees beside messages and tools."""
    given = fields.get("chat_template_kwargs")
    effort = fields.get("reasoning_effort")
    documents = fields.get("documents")
    if given is None and effort is None and documents is None:
        return _NO_VARIABLES
    found: dict[str, Any] = {}
    if given is not None:
        if not isinstance(given, dict) or not _NOT_VARIABLES.isdisjoint(given):
            raise NotExact("option")
        # These values stand for "not given".
        found = {name: value for name, value in given.items() if value not in (None, "auto")}
        features.add("kwargs")
    if documents is not None:
        if not isinstance(documents, list) or not all(isinstance(d, dict) for d in documents):
            raise NotExact("option")
        found["documents"] = documents
        features.add("documents")
    if effort is not None:
        if not isinstance(effort, str):
            raise NotExact("option")
        found["reasoning_effort"] = effort
        if not isinstance(given, dict) or "enable_thinking" not in given:
            found["enable_thinking"] = effort != "none"
        features.add("effort")
    return found


_NO_VARIABLES: dict[str, Any] = {}
