"""A model's tokenizer and chat template, read from its folder. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from gateway.core.blocks import token_bytes
from gateway.prompt.chat_template import ChatTemplate, ContentFormat, TemplateFailed
from gateway.prompt.conversation import Conversation


class TokenizerMissing(Exception):
    """The folder holds no tokenizer that can be read; says which file and why."""


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """Token ids for text and for conversations; ``template`` is None if the model has none, and
    ``tool_template`` if conversations with tools have no other. ``content`` is what a template is
    given as a message's text, ``defaults`` are variables that a request may override."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    tool_template: ChatTemplate | None = None
    content: ContentFormat = "string"
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_all(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """The same for several texts, spread over cores."""
        found = self.tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in found]

    def around(self) -> tuple[bytes, bytes]:
        """The ids that ``add_special_tokens`` puts before and behind a text, as bytes."""
        inner, whole = self.encode("a", False), self.encode("a", True)
        at = next(i for i in range(len(whole)) if whole[i : i + len(inner)] == inner)
        return token_bytes(whole[:at]), token_bytes(whole[at + len(inner) :])

    def render(self, conversation: Conversation) -> str:
        """Raises TemplateFailed, and NotExact for what only the worker knows."""
        with_tools = conversation.tools is not None and self.tool_template is not None
        template = self.tool_template if with_tools else self.template
        if template is None:
            raise TemplateFailed("the model has no chat template")
        if self.defaults:
            seen = {**self.defaults, **conversation.variables}
            conversation = replace(conversation, variables=seen)
        return template.render(conversation, self.content)


def load_tokenizer(folder: Path, chat_template: Path | str | None) -> ModelTokenizer:
    """Read ``tokenizer.json`` and the chat template: the given one (a file, or its text), else
    ``chat_template.jinja``, else ``chat_template`` of ``tokenizer_config.json``, which may name a
    template of its own for tools.

    Raises TokenizerMissing.
    """
    path = folder / "tokenizer.json"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TokenizerMissing(f"{path}: {error.strerror}") from error
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises no narrower one
        raise TokenizerMissing(f"{path} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    special = _special_tokens(config)
    try:
        made = {
            name: ChatTemplate(source, special)
            for name, source in _template_sources(folder, chat_template, config).items()
        }
    except TemplateFailed as error:
        raise TokenizerMissing(f"the chat template cannot be read: {error}") from error
    return ModelTokenizer(tokenizer, made.get("default"), made.get("tool_use"))


def _template_sources(
    folder: Path, chat_template: Path | str | None, config: dict[str, Any]
) -> dict[str, str]:
    if isinstance(chat_template, str):
        return {"default": chat_template}
    if chat_template is not None and not chat_template.is_file():
        raise TokenizerMissing(f"{chat_template}: no such chat template")
    for path in (chat_template, folder / "chat_template.jinja"):
        if path is not None and path.is_file():
            return {"default": _read_text(path)}
    source = config.get("chat_template")
    if isinstance(source, str):
        return {"default": source}
    named = source if isinstance(source, list) else []
    return {
        str(one["name"]): one["template"]
        for one in named
        if isinstance(one, dict) and isinstance(one.get("template"), str) and "name" in one
    }


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerMissing(f"{path}: {error}") from error


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like, given as text or as an object with ``content``."""
    found = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError) as error:
        raise TokenizerMissing(f"{path}: {error}") from error
    return value if isinstance(value, dict) else {}
