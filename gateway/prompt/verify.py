"""Whether the local token ids are the engine's: the same probes given to both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from gateway.prompt.chat_template import ContentFormat, TemplateFailed
from gateway.prompt.conversation import NotExact, read_conversation
from gateway.prompt.tokenizer import ModelTokenizer

Tokenize = Callable[[dict[str, Any]], Awaitable[list[int] | None]]
"""Asks a worker's ``POST /tokenize``; takes the body, gives the ids, None where it refuses."""

_SPECIAL = "<|im_start|>user <|endoftext|> </s> [INST]"
_MIXED = (
    "  Zwölf Boxkämpfer, 日本語のテキスト, 🙂🏽 naïve\n\n\tdef f(x):\n        return x ** 2\r\n"
)
TEXTS = {"mixed": _MIXED, "special": _SPECIAL, "plain": "The quick brown fox. " * 20}

_USER = {"role": "user", "content": "What is the capital of France?"}
_LOOK_UP = {
    "type": "function",
    "function": {
        # Keys in another order than the engine writes them, one that it drops, one that it adds.
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {"city": {"type": "string", "enum": ["Köln", "<Paris>"]}, "at": {}},
        },
        "x-unknown": 1,
        "name": "look_up",
    },
}
_CLOCK_FUNCTION = {"name": "clock", "description": "The time.\n"}
_CLOCK = {"type": "function", "function": _CLOCK_FUNCTION}
_CALL = {
    "type": "function",
    "id": "call_1",
    "function": {"name": "look_up", "arguments": '{"city": "Köln", "at": {"b": 1.0, "a": [true]}}'},
}
_CALLED = [
    _USER,
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "name": "look_up", "content": "12 °C"},
]
_TWO_CALLS = [
    _USER,
    {
        "role": "assistant",
        "content": "Both.",
        "tool_calls": [
            _CALL,
            {**_CALL, "id": "c2", "function": {"name": "clock", "arguments": ""}},
        ],
    },
]


@dataclass(frozen=True, slots=True)
class Probe:
    """``fields`` of a chat completion; ``feature`` is what it has beyond plain text."""

    name: str
    feature: str | None
    fields: dict[str, Any]


def _chat(name: str, feature: str | None, messages: list[Any], **more: Any) -> Probe:
    return Probe(name, feature, {"messages": messages, **more})


def _parts(*texts: Any) -> list[Any]:
    return [{"type": "text", "text": text} for text in texts]


PROBES = (
    _chat("one turn", None, [_USER]),
    _chat("one turn, not begun", None, [_USER], add_generation_prompt=False),
    _chat(
        "system",
        None,
        [
            {"role": "system", "content": "Answer briefly.\n\nUse no lists."},
            {"role": "user", "content": _MIXED},
        ],
    ),
    _chat(
        "turns",
        None,
        [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": " Hi there! "},
            {"role": "user", "content": _SPECIAL},
        ],
    ),
    _chat("empty", None, [{"role": "user", "content": ""}]),
    _chat(
        "parts",
        "parts",
        [
            {"role": "system", "content": _parts("Be brief. ", " Be kind.")},
            {"role": "user", "content": _parts(" one ", "", "two")},
        ],
    ),
    _chat(
        "parts of an answer",
        "parts",
        [_USER, {"role": "assistant", "content": _parts("a", "b")}],
    ),
    _chat(
        "unknown keys",
        "extras",
        [{"role": "user", "content": [{"cache_control": {"type": "x"}, **_parts("a")[0]}]}],
    ),
    _chat(
        "unknown keys of a call",
        "extras",
        [_USER, {"role": "assistant", "tool_calls": [{"index": 0, **_CALL}]}],
    ),
    _chat(
        "strict tool", "extras", [_USER],
        tools=[{**_CLOCK, "function": {"strict": True, **_CLOCK_FUNCTION}}],
    ),
    _chat("tools", "tools", [_USER], tools=[_LOOK_UP, _CLOCK]),
    _chat("tools, not begun", "tools", _TWO_CALLS[:1], tools=[_CLOCK], add_generation_prompt=False),
    _chat("tool calls", "tool_calls", _CALLED),
    _chat("two tool calls", "tool_calls", _TWO_CALLS),
    _chat("tools and their calls", "tool_calls", _CALLED, tools=[_LOOK_UP]),
    _chat(
        "reasoning", "reasoning",
        [_USER, {"role": "assistant", "content": "Paris", "reasoning_content": "Hm."}, _USER],
    ),
    _chat("developer", "developer", [{"role": "developer", "content": "Be brief."}, _USER]),
    _chat(
        "developer behind a system message", "developer",
        [{"role": "system", "content": "a"}, _USER, {"role": "developer", "content": "b"}, _USER],
    ),
    _chat(
        "continued", "continue",
        [_USER, {"role": "assistant", "content": "It is "}],
        add_generation_prompt=False, continue_final_message=True,
    ),
    _chat(
        "variables", "kwargs", [_USER],
        chat_template_kwargs={"enable_thinking": False, "custom": "x", "unset": None},
    ),
    _chat("documents", "documents", [_USER], documents=[{"title": "T", "text": "Text"}]),
    _chat("effort", "effort", [_USER], reasoning_effort="high"),
    _chat("special tokens", "special", [_USER], add_special_tokens=True),
    _chat(
        "billing line", "billing",
        [{"role": "system", "content": "x-anthropic-billing-header: a\nBe brief."}, _USER],
    ),
)  # fmt: skip


def tokenize_body(model: str, fields: dict[str, Any]) -> dict[str, Any]:
    """What ``/tokenize`` is asked for a chat completion of these fields. It knows fewer of them:
    the others go the way that they have inside the engine, as template variables."""
    body: dict[str, Any] = {"model": model, "messages": [_renamed(m) for m in fields["messages"]]}
    for name in ("tools", "add_generation_prompt", "continue_final_message", "add_special_tokens"):
        if fields.get(name) is not None:
            body[name] = fields[name]
    given = dict(fields.get("chat_template_kwargs") or {})
    if (effort := fields.get("reasoning_effort")) is not None:
        given = {"enable_thinking": effort != "none"} | given | {"reasoning_effort": effort}
    if fields.get("documents") is not None:
        given["documents"] = fields["documents"]
    if given:
        body["chat_template_kwargs"] = given
    return body


def _renamed(message: dict[str, Any]) -> dict[str, Any]:
    if "reasoning_content" not in message:
        return message
    kept = {name: value for name, value in message.items() if name != "reasoning_content"}
    reasoning = message.get("reasoning")
    return {**kept, "reasoning": message["reasoning_content"] if reasoning is None else reasoning}


@dataclass(frozen=True, slots=True)
class Verdict:
    """``failed``: names of the probes that were read otherwise, by their feature; ``content``:
    what the template is given, which the probes tell."""

    content: ContentFormat
    failed: dict[str | None, list[str]]


async def verify(model: str, local: ModelTokenizer, tokenize: Tokenize) -> Verdict:
    """Raises what ``tokenize`` raises."""
    texts: list[str] = []
    for name, text in TEXTS.items():
        for special in (True, False):
            body = {"model": model, "prompt": text, "add_special_tokens": special}
            if await tokenize(body) != local.encode(text, special):
                texts.append(f"text: {name}")
    theirs = [await tokenize(tokenize_body(model, probe.fields)) for probe in PROBES]
    verdicts = [_judge(replace(local, content=way), way, theirs) for way in _WAYS]
    best = min(verdicts, key=lambda v: (len(v.failed.get(None, ())), len(v.failed)))
    if texts:
        best.failed[None] = [*texts, *best.failed.get(None, [])]
    return best


_WAYS: tuple[ContentFormat, ...] = ("string", "openai")


def _judge(local: ModelTokenizer, way: ContentFormat, theirs: list[list[int] | None]) -> Verdict:
    failed: dict[str | None, list[str]] = {}
    for probe, ids in zip(PROBES, theirs, strict=True):
        if _ours(local, probe.fields) != ids:
            failed.setdefault(probe.feature, []).append(f"chat: {probe.name}")
    return Verdict(way, failed)


def _ours(local: ModelTokenizer, fields: dict[str, Any]) -> list[int] | None:
    """None where the template refuses: so must the engine then."""
    try:
        conversation = read_conversation(fields, False)
        return local.encode(local.render(conversation), conversation.special)
    except (TemplateFailed, NotExact):
        return None
