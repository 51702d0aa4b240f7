"""A model's chat template, rendered as the engine renders it."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

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


class TemplateFailed(Exception):
    """The template refused the conversation, or is not a valid template."""


class ChatTemplate:
    """A jinja2 template in a sandbox: templates come with models, that is from strangers.

    Whitespace control, ``tojson``, ``raise_exception`` and ``strftime_now`` are as in transformers,
    which the engine renders with.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateFailed(str(error)) from error
        self._special_tokens = special_tokens

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        """The prompt text of a conversation; raises TemplateFailed."""
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except _FAILURES as error:
            raise TemplateFailed(str(error)) from error


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
