"""A model's chat template, rendered as the engine renders it."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from gateway.prompt.conversation import Conversation, NotExact

ContentFormat = Literal["string", "openai"]
"""Whether the template is given a message's text as text, or as a list of parts."""

_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What the code of a template, or of what it calls, may raise."""

_MARK = "(the last message goes on here) "
"""Where an open last message ends: a template may cut the space at the end of a message."""


class TemplateFailed(Exception):
    """The template refused the conversation, or is not a valid template."""


class ChatTemplate:
    """A jinja2 template in a sandbox: templates come with models, that is from strangers.

    Whitespace control, ``tojson``, ``raise_exception``, ``strftime_now`` and the ``generation``
    block are as in transformers, which the engine renders with.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateFailed(str(error)) from error
        self._source = source
        self._special_tokens = special_tokens
        self._knows_developer = '"developer"' in source or "'developer'" in source

    def render(self, conversation: Conversation, content: ContentFormat) -> str:
        """The prompt text; raises TemplateFailed, and NotExact where only the worker knows it."""
        if any(name in self._source for name in conversation.unknown):
            raise NotExact("option")
        shape = _as_text if content == "string" else _as_parts
        messages = shape(conversation.messages)
        if "developer" in conversation.features and not self._knows_developer:
            messages = _developer_as_system(messages)
        if not conversation.continues:
            return self._write(conversation, messages)
        if "content" not in self._source:  # transformers looks for the word
            raise TemplateFailed("the template shows no content to go on with")
        before, last = _marked(messages)
        return _up_to_mark(self._write(conversation, before), last)

    def _write(self, conversation: Conversation, messages: list[dict[str, Any]]) -> str:
        variables: dict[str, Any] = {"documents": None, **self._special_tokens}
        variables |= conversation.variables
        try:
            return self._template.render(
                variables,
                messages=messages,
                tools=conversation.tools,
                add_generation_prompt=conversation.begins,
            )
        except _FAILURES as error:
            raise TemplateFailed(str(error)) from error


def _as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        message
        if isinstance(message["content"], str)
        else message | {"content": _joined(part["text"] for part in message["content"])}
        for message in messages
    ]


def _joined(texts: Any) -> str:
    return "\n".join(text for text in texts if text)


def _as_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    shaped = []
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            if not isinstance(content, str):
                content = "\n".join(part["text"] for part in content)
        elif isinstance(content, str):
            content = [{"type": "text", "text": content}]
        shaped.append(message | {"content": content})
    return shaped


def _developer_as_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Developers' messages for a template that knows none: one system message, at the front."""
    renamed = [
        {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    systems = [at for at, message in enumerate(renamed) if message["role"] == "system"]
    if systems == [0]:
        return renamed
    texts = []
    for at in systems:
        content = renamed[at]["content"]
        if not isinstance(content, str):
            content = "\n".join(part["text"] for part in content)
        if content:
            texts.append(content)
    rest = [message for message in renamed if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest]


def _marked(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The messages with the mark at the end of the last text, and that text."""
    content = messages[-1]["content"]
    marked: Any
    if isinstance(content, str):
        text, marked = content, content + _MARK
    elif content:
        text = content[-1]["text"]
        marked = [*content[:-1], content[-1] | {"text": text + _MARK}]
    else:
        raise TemplateFailed("the last message has no text to go on with")
    return [*messages[:-1], messages[-1] | {"content": marked}], text


def _up_to_mark(rendered: str, text: str) -> str:
    at = rendered.rfind(_MARK.strip())
    if at < 0 or text.strip() not in rendered:
        raise TemplateFailed("the last message does not show")
    # Without the space of the mark, the template cuts what ends a message, and so it is here.
    return rendered[:at] if rendered.startswith(_MARK, at) else rendered[:at].rstrip()


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what an assistant said, for training; its text is rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
