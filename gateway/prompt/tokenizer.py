"""A model's tokenizer and chat template, read from its folder. Nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from gateway.core.blocks import token_bytes
from gateway.prompt.chat_template import ChatTemplate, TemplateFailed


class TokenizerMissing(Exception):
    """The folder holds no tokenizer that can be read; says which file and why."""


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """Token ids for text and for conversations; ``template`` is None if the model has none."""

    tokenizer: Tokenizer
    template: ChatTemplate | None

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

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        """Raises TemplateFailed."""
        if self.template is None:
            raise TemplateFailed("the model has no chat template")
        return self.template.render(messages, add_generation_prompt)


def load_tokenizer(folder: Path, chat_template: Path | None) -> ModelTokenizer:
    """Read ``tokenizer.json`` and the chat template: the given file, else
    ``chat_template.jinja``, else ``chat_template`` of ``tokenizer_config.json``.

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
    source = _template_source(folder, chat_template, config)
    if source is None:
        return ModelTokenizer(tokenizer, None)
    try:
        return ModelTokenizer(tokenizer, ChatTemplate(source, _special_tokens(config)))
    except TemplateFailed as error:
        raise TokenizerMissing(f"the chat template cannot be read: {error}") from error


def _template_source(
    folder: Path, chat_template: Path | None, config: dict[str, Any]
) -> str | None:
    for path in (chat_template, folder / "chat_template.jinja"):
        if path is not None and path.is_file():
            return _read_text(path)
        if path is not None and path is chat_template:
            raise TokenizerMissing(f"{path}: no such chat template")
    source = config.get("chat_template")
    return source if isinstance(source, str) else None


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
