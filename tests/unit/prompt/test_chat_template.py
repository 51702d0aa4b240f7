from __future__ import annotations

from datetime import datetime

import pytest

from gateway.prompt.chat_template import ChatTemplate, TemplateFailed
from gateway.prompt.conversation import Conversation
from tests.unit.prompt.tiny import TEMPLATE

USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: list[dict[str, str]] = USER, begin: bool = False) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(Conversation(list(messages), begins=begin), "string")


def test_a_conversation_is_rendered() -> None:
    messages = [*USER, {"role": "assistant", "content": "Yo"}]
    said = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
    assert render(TEMPLATE, messages) == said
    assert render(TEMPLATE, messages, begin=True) == said + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{{ unk_token }}", ""),
        ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{{ messages | length }}", "1"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hi"}]'),
        ("{{ {'b': 'é', 'a': [1]} | tojson(indent=1) }}", '{\n "b": "é",\n "a": [\n  1\n ]\n}'),
        ("{{ {'x': '<&>'} | tojson }}", '{"x": "<&>"}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% if tools %}t{% endif %}{% if documents is none %}d{% endif %}", "d"),
        ("{% if tools is defined %}defined{% endif %}", "defined"),
    ],
)
def test_it_is_rendered_as_transformers_does(source: str, text: str) -> None:
    assert render(source) == text


def test_the_date_is_there() -> None:
    assert render("{{ strftime_now('%Y') }}") == datetime.now().strftime("%Y")


def test_text_is_not_escaped() -> None:
    assert render("{{ messages[0].content }}", [{"content": "<a> & \"b\" 'c'"}]) == (
        "<a> & \"b\" 'c'"
    )


def test_special_words_in_a_text_are_text_to_the_template() -> None:
    assert render("{{ messages[0].content }}", [{"content": "{{ bos_token }}"}]) == (
        "{{ bos_token }}"
    )


@pytest.mark.parametrize("source", ["{% if %}", "{{ }}", "{% endfor %}", "{% include 'x' %}{{"])
def test_what_is_no_template_is_refused(source: str) -> None:
    with pytest.raises(TemplateFailed):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].nothing.more }}",
        "{{ 'a'.index('b') }}",
        "{{ 1 / 0 }}",
        "{{ 1 % 0 }}",
        "{% for i in range(10 ** 7) %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 10 ** 400 * 1.0 }}",
        "{{ '%d' % 'x' }}",
        "{{ 'x'.encode('ascii').decode('utf-16') }}",
        "{% include 'other' %}",
    ],
)
def test_a_template_that_fails_in_any_way_is_a_failed_template(source: str) -> None:
    with pytest.raises(TemplateFailed):
        render(source)


def test_the_message_of_a_refusal_is_the_template_s() -> None:
    with pytest.raises(TemplateFailed, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_stranger_s_template_reaches_nothing(source: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    try:
        shown = render(source, messages)
    except TemplateFailed:
        shown = ""
    assert shown == ""
    assert messages == USER
