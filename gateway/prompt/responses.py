"""A body of ``/v1/responses`` as the conversation that vLLM makes of it.

Left to bytes: what continues a stored response, input that is cut to fit, and tools other than
functions. Items that belong to one turn of the assistant are joined into one message, as there.
"""

from __future__ import annotations

from typing import Any

from gateway.prompt.conversation import (
    Conversation,
    NotExact,
    call_arguments,
    read_conversation,
    read_tools,
    variables,
)

_STORED = ("previous_response_id", "previous_input_messages", "prompt")


def read_responses(fields: dict[str, Any], drops_tools: bool) -> Conversation:
    """Raises NotExact."""
    if any(fields.get(name) is not None for name in _STORED):
        raise NotExact("stored")
    if fields.get("truncation", "disabled") != "disabled":
        raise NotExact("option")
    if any(fields.get(name) is not None for name in ("mm_processor_kwargs", "media_io_kwargs")):
        raise NotExact("option")
    features: set[str] = set()
    messages: list[dict[str, Any]] = []
    instructions, given = fields.get("instructions"), fields.get("input")
    if isinstance(instructions, str) and instructions:
        messages += _plain({"role": "system", "content": instructions}, features)
    if isinstance(given, str):
        messages += _plain({"role": "user", "content": given}, features)
    elif isinstance(given, list) and given:
        for item in given:
            _add(messages, item, features)
    else:
        raise NotExact("no_prompt")
    tools = _tools(fields.get("tools"))
    if tools:
        shown = {"tools": tools, "tool_choice": fields.get("tool_choice")}
        tools = read_tools(shown, features, drops_tools)
    reasoning = fields.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    given = fields.get("chat_template_kwargs")
    if isinstance(given, dict) and any(value in (None, "auto") for value in given.values()):
        raise NotExact("option")  # left out or not by the worker's own defaults
    asked = {
        "chat_template_kwargs": given,
        "reasoning_effort": effort,
    }
    seen = variables(asked, features)
    # This endpoint adds special tokens to what the template has written.
    ordered = [_in_order(message) for message in messages]
    return Conversation(ordered, tools, seen, special=True, features=frozenset(features))


def _plain(message: dict[str, Any], features: set[str]) -> list[dict[str, Any]]:
    """One message that is read as in a chat completion."""
    read = read_conversation({"messages": [message]}, False)
    features |= read.features
    return read.messages


def _add(messages: list[dict[str, Any]], item: object, features: set[str]) -> None:
    if not isinstance(item, dict) or item.get("status") in ("in_progress", "incomplete"):
        raise NotExact("not_text")
    open_turn = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    match item:
        case {"type": "function_call", "call_id": str(identity), "name": str(name)}:
            if item.get("namespace"):
                raise NotExact("not_text")
            features.add("tool_calls")
            arguments = call_arguments(item.get("arguments"))
            function = {"name": name, "arguments": arguments}
            call = {"id": identity, "function": function, "type": "function"}
            _join(messages, open_turn, "tool_calls", [call])
        case {"type": "function_call_output", "call_id": str(identity)}:
            output = item.get("output")
            result = {"role": "tool", "content": output, "tool_call_id": identity}
            messages += _plain(result, features)
        case {"type": "reasoning"}:
            features.add("reasoning")
            _join(messages, open_turn, "reasoning", _thought(item))
        case {"role": "assistant"}:
            _join(messages, open_turn, "content", _said(item.get("content")))
        case {"role": "user" | "system" | "developer"} if item.get("type", "message") == "message":
            message = {"role": item["role"], "content": item.get("content")}
            messages += _plain(message, features)
        case _:
            raise NotExact("not_text")


def _join(
    messages: list[dict[str, Any]], open_turn: dict[str, Any] | None, name: str, value: Any
) -> None:
    """Into the assistant's message before, if that has none of it yet; calls add up.

    ``content`` stays None until text comes, which then belongs to the same message.
    """
    if open_turn is not None and name == "tool_calls":
        open_turn["tool_calls"] = [*open_turn.get("tool_calls", ()), *value]
        return
    if open_turn is None or not _lacks(open_turn, name):
        open_turn = {"role": "assistant", "content": []}
        messages.append(open_turn)
    open_turn[name] = value
    if name == "reasoning":
        open_turn["reasoning_content"] = value


_ORDER = ("role", "content", "tool_calls", "reasoning", "reasoning_content")


def _in_order(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "assistant":
        return message
    return {name: message[name] for name in _ORDER if name in message}


def _lacks(turn: dict[str, Any], name: str) -> bool:
    return turn["content"] == [] if name == "content" else name not in turn


def _thought(item: dict[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise NotExact("not_text")
    for name in ("content", "summary"):
        parts = item.get(name)
        if isinstance(parts, list) and parts:
            return _text(parts[0])
    return ""


def _said(content: object) -> str:
    """Of several parts the worker takes the first."""
    if isinstance(content, list) and content:
        return _text(content[0])
    if not isinstance(content, str):
        raise NotExact("not_text")
    return content


def _text(part: object) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        raise NotExact("not_text")
    return str(part["text"])


def _tools(tools: object) -> list[dict[str, Any]] | None:
    """Function tools, moved into the shape of a chat completion's."""
    if not tools:
        return None
    if not isinstance(tools, list):
        raise NotExact("option")
    for tool in tools:
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise NotExact("option")
    names = ("name", "description", "parameters", "strict", "defer_loading")
    return [
        {"type": "function", "function": {name: tool[name] for name in names if name in tool}}
        for tool in tools
    ]
