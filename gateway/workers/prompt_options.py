"""vLLM's own arguments that decide what a prompt is, as they stand behind ``--``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PATHS = ("--chat-template", "--tokenizer")


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """``chat_template`` is a file or, where there is no such file, the template's text."""

    tokenizer: str | None = None
    chat_template: Path | str | None = None
    defaults: dict[str, Any] = field(default_factory=dict)
    drops_tools: bool = False


def prompt_options(arguments: Sequence[str]) -> PromptOptions:
    given = given_options(arguments)
    template: Path | str | None = given.get("--chat-template")
    if isinstance(template, str) and not any(mark in template for mark in "{}\n"):
        template = Path(template)
    try:
        defaults = json.loads(given.get("--default-chat-template-kwargs", "{}"))
    except ValueError:  # vLLM says so itself, and does not start
        defaults = {}
    return PromptOptions(
        given.get("--tokenizer"),
        template,
        defaults if isinstance(defaults, dict) else {},
        "--exclude-tools-when-tool-choice-none" in given,
    )


def with_whole_paths(arguments: Sequence[str]) -> list[str]:
    """The arguments with paths that do not depend on where vLLM is started."""
    whole: list[str] = []
    before = ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and _is_path_option(name):
            whole.append(f"{name}={_whole(value)}")
        else:
            whole.append(_whole(argument) if _is_path_option(before) else argument)
        before = argument
    return whole


def _is_path_option(name: str) -> bool:
    return name.replace("_", "-") in _PATHS


def _whole(value: str) -> str:
    return os.path.abspath(value) if value and os.path.exists(value) else value


def given_options(arguments: Sequence[str]) -> dict[str, str]:
    """The options among vLLM's arguments, in its own spelling, each with what follows it."""
    given: dict[str, str] = {}
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        if argument.startswith("-"):
            name, equals, value = argument.partition("=")
            if name.startswith("--"):
                name = name.replace("_", "-")
            given[name] = value if equals else following
    return given
