"""Each probe with its feature taken out: where a template shows the feature, other ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.prompt.verify import Probe

Fields = dict[str, Any]


def _plain(part: Any) -> str:
    return part if isinstance(part, str) else str(part["text"])


def _each(change: Callable[[Fields], Fields]) -> Callable[[Fields], Fields]:
    return lambda fields: fields | {"messages": [change(m) for m in fields["messages"]]}


def _joined(message: Fields) -> Fields:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": "".join(map(_plain, content))}


def _without(*names: str) -> Callable[[Fields], Fields]:
    return lambda fields: {name: value for name, value in fields.items() if name not in names}


def _known(fields: Fields) -> Fields:
    """Without keys that no API has."""
    made = _each(_known_message)(fields)
    for tool in made.get("tools", ()):
        made["tools"] = [{**tool, "function": _without("strict")(tool["function"])}]
    return made


def _known_message(message: Fields) -> Fields:
    made = dict(message)
    if isinstance(made.get("content"), list):
        made["content"] = [_without("cache_control")(part) for part in made["content"]]
    if "tool_calls" in made:
        made["tool_calls"] = [_without("index")(call) for call in made["tool_calls"]]
    return made


def _untold(message: Fields) -> Fields:
    return message | {"content": message["content"].replace("billing", "other")}


_TAKEN_OUT: dict[str, Callable[[Fields], Fields]] = {
    "billing": _each(_untold),
    "continue": _without("continue_final_message"),
    "developer": _each(lambda m: m | {"role": m["role"].replace("developer", "user")}),
    "documents": _without("documents"),
    "effort": _without("reasoning_effort"),
    "extras": _known,
    "kwargs": _without("chat_template_kwargs"),
    "parts": _each(_joined),
    "reasoning": _each(_without("reasoning_content")),
    "special": _without("add_special_tokens"),
    "tool_calls": _each(_without("tool_calls", "tool_call_id", "name")),
    "tools": _without("tools"),
}


def without_feature(probe: Probe) -> Fields:
    """The probe's fields without what it is there for; a plain one with other text."""
    if probe.feature is None:
        return {"messages": [*probe.fields["messages"], {"role": "user", "content": "."}]}
    return _TAKEN_OUT[probe.feature](probe.fields)
