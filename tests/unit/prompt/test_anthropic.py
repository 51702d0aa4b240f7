from __future__ import annotations

from typing import Any

import pytest

from gateway.prompt.anthropic import as_chat, read_messages
from gateway.prompt.conversation import NotExact

USER = {"role": "user", "content": "Hi"}
BILLING = {"type": "text", "text": "x-anthropic-billing-header: 1"}
LOOK_UP = {"name": "look_up", "input_schema": {"properties": {"city": {"type": "string"}}}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}


def messages(*said: Any, **fields: Any) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = as_chat({"messages": list(said), **fields})["messages"]
    return made


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("Be brief.", ["Be brief."]),
        ([text("a"), BILLING, text("b")], ["ab"]),
        ([BILLING], []),
        ("", []),
        (None, []),
        ([], []),
    ],
)
def test_the_system_text_is_one_message(system: object, expected: list[str]) -> None:
    made = messages(USER, system=system)
    assert made == [*({"role": "system", "content": said} for said in expected), USER]


def test_one_text_is_text_and_several_are_parts() -> None:
    assert messages({"role": "user", "content": [text("a")]}) == [{"role": "user", "content": "a"}]
    parts = [{"type": "text", "text": said} for said in "ab"]
    asked = {"role": "user", "content": [text("a"), text(""), text("b")]}
    assert messages(asked) == [{"role": "user", "content": parts}]


def test_results_of_tools_go_before_what_is_said_with_them() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    use = {"type": "tool_use", "id": "t", "name": "look_up", "input": {"city": "Köln"}}
    results = [
        {"type": "tool_result", "tool_use_id": "t", "content": [text("a"), text("b")]},
        {"type": "tool_result", "tool_use_id": "u", "content": "c", "is_error": True},
        {"type": "tool_result"},
    ]
    made = messages(
        USER,
        {"role": "assistant", "content": [thought, text("So"), use]},
        {"role": "user", "content": [text("and?"), *results]},
        {"role": "user", "content": results[:1]},
    )
    call = {"name": "look_up", "arguments": '{"city": "K\\u00f6ln"}'}
    assert made == [
        USER,
        {
            "role": "assistant",
            "reasoning": "hm",
            "tool_calls": [{"id": "t", "type": "function", "function": call}],
            "content": "So",
        },
        {"role": "tool", "tool_call_id": "t", "content": "a\nb"},
        {"role": "tool", "tool_call_id": "u", "content": "c"},
        {"role": "tool", "tool_call_id": "", "content": ""},
        {"role": "user", "content": "and?"},
        {"role": "tool", "tool_call_id": "t", "content": "a\nb"},
    ]


def test_a_message_without_content_stays_if_it_is_the_assistant_s() -> None:
    empty: list[Any] = [{"role": "assistant", "content": []}, {"role": "user", "content": []}]
    assert messages(*empty, USER) == [{"role": "assistant"}, USER]


def test_tools_and_options_are_a_chat_completion_s() -> None:
    fields = {
        "messages": [USER],
        "tools": [LOOK_UP],
        "tool_choice": {"type": "none"},
        "output_config": {"effort": "low"},
        "chat_template_kwargs": {"a": 1},
        "max_tokens": 5,
        "metadata": {},
    }
    read = read_messages(fields, False)
    schema = {**LOOK_UP["input_schema"], "type": "object"}  # type: ignore[dict-item]
    function = {"name": "look_up", "description": None, "parameters": schema}
    assert read.tools == [{"type": "function", "function": function}]
    assert read.variables == {"a": 1, "reasoning_effort": "low", "enable_thinking": True}
    assert not read.special and read.begins
    assert read_messages(fields, True).tools is None
    assert read_messages({"messages": [USER], "tools": []}, False).tools == []


def test_what_thinking_is_disabled_by_only_the_worker_knows() -> None:
    unknown = ("reasoning_effort", "enable_thinking")
    for kind, expected in (("disabled", unknown), ("enabled", ()), ("adaptive", ())):
        read = read_messages({"messages": [USER], "thinking": {"type": kind}}, False)
        assert read.unknown == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "system", "content": "later"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": ["a"]}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_addition"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "content": [{"type": "image"}]}],
                }
            ]
        },
        {"messages": [USER], "tools": [{"name": "web_search", "type": "web_search_20250305"}]},
        {"messages": [USER], "system": 5},
        {"messages": [None]},
        {"messages": []},
        {},
    ],
)
def test_other_things_are_not_exact(fields: dict[str, Any]) -> None:
    with pytest.raises(NotExact):
        read_messages(fields, False)
