from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.prompt.conversation import Conversation, NotExact
from gateway.prompt.responses import read_responses

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"b": 1}', "id": "x"}
TOOL = {"type": "function", "name": "f", "parameters": {"b": 1}, "strict": True}


def read(given: Any, **fields: Any) -> Conversation:
    return read_responses({"input": given, **fields}, False)


def call(identity: str = "c", **arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"id": identity, "function": function, "type": "function"}


def said(role: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": [], **more}


def test_a_text_is_a_user_s_message_behind_the_instructions() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert read("Hi").messages == [USER]
    assert read("Hi", instructions="Be brief.").messages == [system, USER]
    assert read([USER], instructions="").messages == [USER]


def test_special_tokens_are_added_to_what_the_template_wrote() -> None:
    assert read("Hi").special
    assert read("Hi").features == frozenset()


def test_items_of_one_turn_are_one_message() -> None:
    thought = {"type": "reasoning", "id": "r", "summary": [], "content": [{"text": "hm"}]}
    answer = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "So"}],
    }
    result = {"type": "function_call_output", "call_id": "c", "output": "done"}
    other = {**CALL, "call_id": "d", "arguments": ""}
    made = read([USER, thought, answer, CALL, other, result, USER]).messages
    assert json.dumps(made) == json.dumps([
        USER,
        {
            "role": "assistant",
            "content": "So",
            "tool_calls": [call(b=1), call("d")],
            "reasoning": "hm",
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "done", "tool_call_id": "c"},
        USER,
    ])  # fmt: skip


def test_what_a_turn_has_already_begins_another() -> None:
    yes, no = ({"role": "assistant", "content": text} for text in ("yes", "no"))
    thought = {"type": "reasoning", "summary": [{"text": "hm"}]}
    thinks = {"reasoning": "hm", "reasoning_content": "hm"}
    assert read([yes, no]).messages == [yes, no]
    assert read([thought, thought]).messages == [said("assistant", **thinks)] * 2
    assert read([CALL, yes]).messages == [{**yes, "tool_calls": [call(b=1)]}]
    assert read([USER, CALL]).messages == [USER, said("assistant", tool_calls=[call(b=1)])]


def test_of_an_answer_s_parts_the_first_counts() -> None:
    parts = [{"type": "output_text", "text": text} for text in "ab"]
    assert read([{"role": "assistant", "content": parts}]).messages == [
        {"role": "assistant", "content": "a"}
    ]


def test_tools_are_a_chat_completion_s() -> None:
    function = {"name": "f", "description": None, "parameters": {"b": 1}, "strict": True}
    assert read("Hi", tools=[TOOL]).tools == [{"type": "function", "function": function}]
    assert read("Hi", tools=[]).tools is None
    dropped = {"input": "Hi", "tools": [TOOL], "tool_choice": "none"}
    assert read_responses(dropped, True).tools is None
    assert read_responses(dropped, False).tools is not None


def test_effort_stands_with_reasoning() -> None:
    asked = read("Hi", reasoning={"effort": "low"}, chat_template_kwargs={"a": 1})
    assert asked.variables == {"a": 1, "reasoning_effort": "low", "enable_thinking": True}
    assert read("Hi", reasoning={"effort": None, "summary": "auto"}).variables == {}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"previous_response_id": "r"}, "stored"),
        ({"previous_input_messages": []}, "stored"),
        ({"truncation": "auto"}, "option"),
        ({"truncation": None}, "option"),
        ({"mm_processor_kwargs": {}}, "option"),
        ({"chat_template_kwargs": {"a": None}}, "option"),
        ({"tools": [{"type": "web_search"}]}, "option"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "option"),
        ({"tools": {"type": "function"}}, "option"),
        ({"input": None}, "no_prompt"),
        ({"input": []}, "no_prompt"),
        ({"input": [5]}, "not_text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "not_text"),
        ({"input": [{**CALL, "namespace": "n"}]}, "not_text"),
        ({"input": [{**CALL, "arguments": "["}]}, "not_text"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "not_text"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "not_text"),
        ({"input": [{"role": "assistant", "content": "a", "status": "in_progress"}]}, "not_text"),
        ({"input": [{"role": "assistant", "content": []}]}, "not_text"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "not_text"),
        ({"input": [{"type": "reasoning", "content": [5]}]}, "not_text"),
    ],
)
def test_other_things_are_not_exact(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotExact) as raised:
        read_responses({"input": "Hi", **fields}, False)
    assert raised.value.reason == reason
