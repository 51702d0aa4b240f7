"""What the parser in front of the template does, as seen in vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.prompt.chat_template import ChatTemplate, ContentFormat, TemplateFailed
from gateway.prompt.conversation import Conversation, NotExact, read_conversation

USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": []}'}}


def read(*messages: Any, drops_tools: bool = False, **fields: Any) -> Conversation:
    return read_conversation({"messages": list(messages), **fields}, drops_tools)


def one(message: dict[str, Any]) -> dict[str, Any]:
    return read(message).messages[0]


def shown(*messages: Any, content: ContentFormat = "string", source: str = "", **more: Any) -> str:
    """What a template is given, as it writes it out."""
    template = ChatTemplate(source or "{{ messages | tojson }}", {})
    return template.render(read(*messages, **more), content)


def dumped(*messages: dict[str, Any]) -> str:
    return json.dumps(list(messages), ensure_ascii=False)


# --- messages


def test_keys_stand_in_the_parser_s_order_and_unknown_ones_are_gone() -> None:
    message = {"name": "bob", "x": 1, "content": "Hi", "role": "user", "tool_call_id": "c"}
    assert shown(message) == dumped({"role": "user", "content": "Hi", "name": "bob"})


def test_a_tool_call_stands_in_the_parser_s_order_with_its_arguments_read() -> None:
    message = {"role": "assistant", "tool_calls": [{"x": 1, **CALL}]}
    call = {
        "id": "c",
        "function": {"arguments": {"b": 1, "a": []}, "name": "f"},
        "type": "function",
    }
    made = dumped({"role": "assistant", "content": "", "tool_calls": [call | {"x": 1}]})
    assert shown(message) == made
    assert read(message).features == {"tool_calls", "extras"}


@pytest.mark.parametrize("calls", [[], None])
def test_no_tool_calls_are_none(calls: Any) -> None:
    assert one({"role": "assistant", "content": "a", "tool_calls": calls}) == {
        "role": "assistant", "content": "a",
    }  # fmt: skip


def test_empty_arguments_are_an_empty_object() -> None:
    call = {**CALL, "function": {"name": "f", "arguments": ""}}
    message = one({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "arguments", ["[]", "5", "null", "{", "{'a': 1}", "[" * 100_000, None, {"a": 1}, 5]
)
def test_arguments_that_versions_read_differently_are_not_exact(arguments: Any) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(NotExact):
        read({"role": "assistant", "tool_calls": [call]})


@pytest.mark.parametrize("name", ["id", "type", "function"])
def test_a_call_without_what_it_needs_is_not_exact(name: str) -> None:
    call = {key: value for key, value in CALL.items() if key != name}
    with pytest.raises(NotExact):
        read({"role": "assistant", "tool_calls": [call]})


def test_reasoning_has_two_names() -> None:
    for given in ({"reasoning": "r"}, {"reasoning_content": "r"}):
        message = one({"role": "assistant", "content": "a", **given})
        assert (message["reasoning"], message["reasoning_content"]) == ("r", "r")
    both = one({"role": "assistant", "content": "a", "reasoning": "x", "reasoning_content": "y"})
    assert both["reasoning_content"] == "x"
    assert "reasoning" not in one({**USER, "reasoning": "r"})


# --- content parts


def test_parts_are_joined_for_a_template_of_texts() -> None:
    parts = [{"type": "text", "text": " a "}, "b", {"type": "text", "text": ""}]
    assert shown({"role": "user", "content": parts}) == dumped(
        {"role": "user", "content": " a \nb"}
    )
    assert shown({"role": "user"}) == dumped({"role": "user", "content": ""})


def test_texts_are_parts_for_a_template_of_parts() -> None:
    part = {"text": "a", "cache_control": {"b": 1}, "type": "text", "uuid": "x"}
    for content, expected in (
        ("a", [{"type": "text", "text": "a"}]),
        ([part], [{"type": "text", "text": "a", "cache_control": {"b": 1}}]),
        (["b"], [{"type": "text", "text": "b"}]),
        ([{"type": "refusal", "refusal": "no"}], [{"type": "text", "text": "no"}]),
        ([{"type": "text", "text": None}], []),
        (None, []),
    ):  # fmt: skip
        asked = shown({"role": "user", "content": content}, content="openai")
        assert asked == dumped({"role": "user", "content": expected})


def test_a_tool_s_result_is_text_for_every_template() -> None:
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "a"}, "b"]}
    expected = dumped({"role": "tool", "content": "a\nb", "tool_call_id": "c"})
    assert shown(result) == shown(result, content="openai") == expected


def test_the_billing_line_is_left_out() -> None:
    line = "x-anthropic-billing-header: 1"
    for content, expected in (
        (line, ""), (line + "\nrest\nmore", "rest\nmore"),
        ([{"type": "text", "text": line}, "b"], "b"),
        ([{"type": "text", "text": line + "\nrest"}, "b"], "rest\nb"),
    ):  # fmt: skip
        message = {"role": "system", "content": content}
        assert shown(message) == dumped({"role": "system", "content": expected})
        assert "billing" in read(message).features
    assert shown({"role": "system", "content": line}, content="openai") == (
        dumped({"role": "system", "content": []})
    )
    assert shown({"role": "user", "content": line}) == dumped({"role": "user", "content": line})


def test_the_billing_line_of_another_part_is_not_exact() -> None:
    refusal = {"type": "refusal", "refusal": "x-anthropic-billing-header: 1"}
    with pytest.raises(NotExact):
        read({"role": "system", "content": [refusal]})


# --- developers


def test_a_template_that_knows_developers_gets_them() -> None:
    source = "{% if messages[0].role == 'developer' %}{{ messages | tojson }}{% endif %}"
    told = {"role": "developer", "content": "a"}
    assert shown(told, USER, source=source) == dumped({**told, "tools": None}, USER)


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("du", ["a", "b"]),
        ("sdu", ["a\n\nb", "c"]),
        ("usu", ["a", "b", "c"]),
        ("udu", ["b", "a", "c"]),
        ("dudu", ["a\n\nc", "b", "d"]),
    ],
)
def test_other_templates_get_one_system_message_in_front(roles: str, expected: list[str]) -> None:
    names = {"d": "developer", "u": "user", "s": "system"}
    messages = [
        {"role": names[role], "content": text} for role, text in zip(roles, "abcd", strict=False)
    ]
    source = "{{ messages | map(attribute='content') | list | tojson }}"
    assert json.loads(shown(*messages, source=source)) == expected


# --- tools


def test_tools_are_written_as_the_parser_writes_them() -> None:
    function = {"x": 1, "parameters": {"b": 1, "a": 2}, "name": "f"}
    flagged = {"function": {**function, "strict": True}, "defer_loading": False, "type": "function"}
    asked = read(USER, tools=[{"function": function, "cache_control": {}}, flagged])
    made = {"name": "f", "description": None, "parameters": {"b": 1, "a": 2}}
    assert json.dumps(asked.tools) == json.dumps([
        {"type": "function", "function": made},
        {
            "type": "function",
            "function": {**made, "strict": True, "defer_loading": False},
            "defer_loading": False,
        },
    ])  # fmt: skip


def test_a_worker_may_drop_tools_that_are_not_to_be_called() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    for choice in (None, "auto", "none", {"type": "function", "function": {"name": "f"}}):
        kept = read(USER, tools=[tool], tool_choice=choice)
        assert kept.tools is not None
        dropped = read(USER, drops_tools=True, tools=[tool], tool_choice=choice)
        assert dropped.tools is None if choice == "none" else dropped == kept
    assert "no_tool_choice" in read(USER, tools=[tool], tool_choice="none").features


# --- variables


def test_values_that_mean_not_given_are_not() -> None:
    given = {"a": None, "b": "auto", "c": 0, "d": False, "e": [], "f": "x"}
    asked = read(USER, chat_template_kwargs=given)
    assert asked.variables == {"c": 0, "d": False, "e": [], "f": "x"}
    assert asked.features == {"kwargs"}


@pytest.mark.parametrize(
    ("effort", "given", "expected"),
    [
        ("low", None, {"reasoning_effort": "low", "enable_thinking": True}),
        ("none", None, {"reasoning_effort": "none", "enable_thinking": False}),
        ("low", {"enable_thinking": False}, {"reasoning_effort": "low", "enable_thinking": False}),
        ("low", {"enable_thinking": None}, {"reasoning_effort": "low"}),
        ("low", {"reasoning_effort": "x"}, {"reasoning_effort": "low", "enable_thinking": True}),
    ],
)
def test_effort_turns_thinking_on(effort: str, given: Any, expected: dict[str, Any]) -> None:
    asked = read(USER, reasoning_effort=effort, chat_template_kwargs=given)
    assert asked.variables == expected


def test_a_variable_goes_before_a_special_token_of_its_name() -> None:
    template = ChatTemplate("{{ bos_token }}", {"bos_token": "<s>"})
    assert template.render(read(USER), "string") == "<s>"
    told = read(USER, chat_template_kwargs={"bos_token": "x"})
    assert template.render(told, "string") == "x"


def test_what_only_the_worker_knows_is_not_exact_where_it_shows() -> None:
    asked = Conversation([USER], unknown=("reasoning_effort", "enable_thinking"))
    assert ChatTemplate("{{ messages[0].content }}", {}).render(asked, "string") == "Hi"
    with pytest.raises(NotExact):
        ChatTemplate("{% if enable_thinking %}{% endif %}", {}).render(asked, "string")


# --- going on


SAYS = (
    "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
TRIMS = SAYS.replace("m.content", "m.content | trim")
PARTS = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "content", "said", "expected"),
    [
        (SAYS, "string", "It is ", "[Hi][It is "),
        (TRIMS, "string", "It is ", "[Hi][It is"),
        (TRIMS, "string", " It is", "[Hi][It is"),
        (SAYS, "string", "", "[Hi]["),
        (SAYS, "string", ["a", "b "], "[Hi][a\nb "),
        (PARTS, "openai", ["a", "b "], "[Hi][a][b "),
    ],
)
def test_the_last_message_is_left_open(
    source: str, content: ContentFormat, said: Any, expected: str
) -> None:
    last = {"role": "assistant", "content": said}
    told = {"add_generation_prompt": False, "continue_final_message": True}
    assert shown(USER, last, content=content, source=source, **told) == expected


@pytest.mark.parametrize("source", ["", "[{{ messages[0].content }}]"])
def test_a_last_message_that_does_not_show_cannot_go_on(source: str) -> None:
    last = {"role": "assistant", "content": "a"}
    told = {"add_generation_prompt": False, "continue_final_message": True}
    template = ChatTemplate(source, {})
    with pytest.raises(TemplateFailed):
        template.render(read(USER, last, **told), "string")


def test_a_block_for_training_is_rendered() -> None:
    source = "{% generation %}{% set a = 1 %}{{ a }}{% endgeneration %}{{ a }}"
    assert ChatTemplate(source, {}).render(read(USER), "string") == "1"


# --- what is plain


def test_plain_text_has_no_features() -> None:
    plain = [SYSTEM, USER, {"role": "assistant", "content": "a", "name": "x"}, USER]
    assert read(*plain, temperature=0, stream=True, tool_choice="auto").features == frozenset()


def test_no_message_is_changed() -> None:
    messages = [SYSTEM, {"role": "assistant", "content": ["a"], "tool_calls": [CALL]}, USER]
    before = json.dumps(messages)
    told = {"add_generation_prompt": False, "continue_final_message": True}
    for content in ("string", "openai"):
        shown(*messages, content=content, source="{{ messages | tojson }}{# content #}", **told)
    assert json.dumps(messages) == before
