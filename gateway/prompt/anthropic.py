"""A body of ``/v1/messages`` as the chat completion that vLLM makes of it.

Left to bytes: images, tools that change during the conversation, and system messages in its midst,
whose place depends on a trial rendering inside the worker.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from gateway.prompt.conversation import Conversation, NotExact, read_conversation

_BILLING = "x-anthropic-billing-header"
_THINKING = ("reasoning_effort", "enable_thinking")


def read_messages(fields: dict[str, Any], drops_tools: bool) -> Conversation:
    """Raises NotExact."""
    conversation = read_conversation(as_chat(fields), drops_tools)
    thinking = fields.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        # The worker tries what its template makes of it, and some versions leave it out.
        return replace(conversation, unknown=_THINKING)
    return conversation


def as_chat(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of the chat completion; raises NotExact."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise NotExact("no_prompt")
    made = _system(fields.get("system"))
    for message in messages:
        _add(made, message)
    chat: dict[str, Any] = {"messages": made}
    if (tools := fields.get("tools")) is not None:
        if not isinstance(tools, list):
            raise NotExact("option")
        chat["tools"] = [_tool(tool) for tool in tools]
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "none":
        chat["tool_choice"] = "none"
    for name in ("chat_template_kwargs", "kv_transfer_params"):
        if fields.get(name) is not None:
            chat[name] = fields[name]
    output = fields.get("output_config")
    if isinstance(output, dict) and output.get("effort") is not None:
        chat["reasoning_effort"] = output["effort"]
    return chat


def _system(system: object) -> list[dict[str, Any]]:
    if not system:
        return []
    if isinstance(system, list):
        texts = [
            block["text"]
            for block in _blocks(system)
            if block.get("type") == "text" and isinstance(block.get("text"), str)
        ]
        system = "".join(text for text in texts if not text.startswith(_BILLING))
    if not isinstance(system, str):
        raise NotExact("not_text")
    return [{"role": "system", "content": system}] if system else []


def _blocks(content: list[Any]) -> list[dict[str, Any]]:
    if not all(isinstance(block, dict) for block in content):
        raise NotExact("not_text")
    return content


def _add(made: list[dict[str, Any]], message: object) -> None:
    """The chat messages that one message becomes: tool results go before its text."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
        raise NotExact("not_text")
    content = message.get("content")
    said: dict[str, Any] = {"role": message["role"]}
    if isinstance(content, str):
        made.append({**said, "content": content})
        return
    if not isinstance(content, list):
        raise NotExact("not_text")
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in _blocks(content):
        match block:
            case {"type": "text", "text": str(text)}:
                if text:
                    texts.append({"type": "text", "text": text})
            case {"type": "thinking", "thinking": str(text)}:
                thoughts.append(text)
            case {"type": "redacted_thinking"}:
                pass
            case {"type": "tool_use", "id": str(identity), "name": str(name)} if identity:
                calls.append(_call(identity, name, block.get("input")))
            case {"type": "tool_result"} if message["role"] == "user":
                made.append(_result(block))
            case _:
                raise NotExact("not_text")
    if thoughts:
        said["reasoning"] = "".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    if texts:
        said["content"] = texts[0]["text"] if len(texts) == 1 else texts
    if "content" in said or message["role"] == "assistant":
        made.append(said)


def _call(identity: str, name: str, given: object) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(given or {})}
    return {"id": identity, "type": "function", "function": function}


def _result(block: dict[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list):
        texts = []
        for part in _blocks(content):
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise NotExact("not_text")
            texts.append(part["text"])
        content = "\n".join(texts)
    if not isinstance(content, str | None):
        raise NotExact("not_text")
    return {
        "role": "tool",
        "tool_call_id": block.get("tool_use_id") or "",
        "content": content or "",
    }


def _tool(tool: object) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("input_schema"), dict):
        raise NotExact("option")
    schema = tool["input_schema"]
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
    }
    for name in ("strict", "defer_loading"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}
