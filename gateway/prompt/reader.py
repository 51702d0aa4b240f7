"""What routing learns of each request's prompt, exactly where it can, else by its bytes."""

from __future__ import annotations

from typing import Any

import orjson

from gateway.core.blocks import Prompt, extra_key, token_bytes
from gateway.prompt.batches import Batches
from gateway.prompt.chat_template import TemplateFailed
from gateway.prompt.memo import MEMO_BYTES, Memo
from gateway.prompt.tokenizer import ModelTokenizer

_INLINE_CHARS = 1024
"""Text up to this is tokenised on the event loop (under 0.5 ms); a thread costs more than that."""

_PLAIN_CHAT = frozenset(("role", "content", "name"))
_CHANGES_CHAT = (
    "tools", "documents", "chat_template", "chat_template_kwargs", "continue_final_message",
    "add_special_tokens", "mm_processor_kwargs", "truncate_prompt_tokens", "reasoning_effort",
    "functions", "media_io_kwargs",
)  # fmt: skip
_CHANGES_TEXT = ("truncate_prompt_tokens", "prompt_embeds", "suffix")


class NotExact(Exception):
    """Why this prompt's token ids are not known here; ``reason`` is a metric label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Prompts:
    """Reads prompts; exact for a model once its tokenizer was verified against the engine."""

    def __init__(self) -> None:
        self._exact: dict[str, ModelTokenizer] = {}
        self._memos: dict[str, Memo] = {}
        self._batches = Batches()
        self.adapters: set[str] = set()

    def use_exact(self, model: str, tokenizer: ModelTokenizer, by_pieces: bool = False) -> None:
        """``by_pieces``: the ids of its text may be joined from those of its pieces."""
        self._exact[model] = tokenizer
        if by_pieces:
            self._memos[model] = Memo(tokenizer, self._batches, MEMO_BYTES)

    def close(self) -> None:
        self._batches.close()

    async def read(self, endpoint: str, fields: dict[str, Any]) -> tuple[Prompt | None, str | None]:
        """The prompt, or what can be hashed of it, and why it is not exact (None if it is).

        Never raises for a request's content.
        """
        extra = self._extra(fields)
        try:
            return Prompt(await self._tokens(endpoint, fields), True, extra), None
        except NotExact as error:
            data = _canonical(endpoint, fields)
            if data is None:
                return None, "no_prompt"
            return Prompt(data, False, extra), error.reason

    def _extra(self, fields: dict[str, Any]) -> bytes:
        """What separates equal tokens in the engine's cache: a LoRA adapter and a cache salt."""
        model, salt = fields.get("model"), fields.get("cache_salt")
        lora = model if isinstance(model, str) and model in self.adapters else None
        return extra_key(lora, salt if isinstance(salt, str) and salt else None)

    async def _tokens(self, endpoint: str, fields: dict[str, Any]) -> bytes:
        if endpoint == "completions" and (ids := _token_ids(fields.get("prompt"))) is not None:
            return ids
        model = fields.get("model")
        if not isinstance(model, str) or model not in self._exact:
            raise NotExact("no_tokenizer")
        tokenizer = self._exact[model]
        memo = self._memos.get(model)
        if endpoint == "completions":
            return await self._encode(tokenizer, memo, _text(fields), _adds_special(fields))
        try:
            text = tokenizer.render(*_conversation(fields))
        except TemplateFailed:
            raise NotExact("template") from None
        return await self._encode(tokenizer, memo, text, False)

    async def _encode(
        self, tokenizer: ModelTokenizer, memo: Memo | None, text: str, special: bool
    ) -> bytes:
        try:
            if len(text) <= _INLINE_CHARS:
                return token_bytes(tokenizer.encode(text, special))
            if memo is not None:
                return await memo.encode(text, special)
            return (await self._batches.submit(tokenizer, [text], special))[0]
        except UnicodeError:  # a lone surrogate
            raise NotExact("not_text") from None


def _token_ids(prompt: object) -> bytes | None:
    """Ids of a prompt given as token ids, or of the first of several; None if it is not."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompt = prompt[0]
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], int):
        return None
    try:
        return token_bytes(prompt)
    except (TypeError, OverflowError):
        return None


def _text(fields: dict[str, Any]) -> str:
    """The text of a completion prompt, of the first of several."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise NotExact("not_text")
    if any(fields.get(name) is not None for name in _CHANGES_TEXT):
        raise NotExact("option")
    return prompt


def _adds_special(fields: dict[str, Any]) -> bool:
    return fields.get("add_special_tokens", True) is not False


def _conversation(fields: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """Messages of text only, and whether the answer is to be begun."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise NotExact("no_prompt")
    if any(fields.get(name) for name in _CHANGES_CHAT):
        raise NotExact("option")
    return [_message(m) for m in messages], fields.get("add_generation_prompt", True) is not False


def _message(message: object) -> dict[str, Any]:
    if not isinstance(message, dict) or not _PLAIN_CHAT.issuperset(message):
        raise NotExact("not_text")
    if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
        raise NotExact("not_text")
    return message


def _canonical(endpoint: str, fields: dict[str, Any]) -> bytes | None:
    """Bytes that share a prefix where prompts do: tools come first, as templates render them."""
    if endpoint == "completions":
        parts: object = fields.get("prompt")
        if isinstance(parts, str):
            return parts.encode("utf-8", "surrogatepass")
    else:
        parts = [p for p in (fields.get("tools"), fields.get("messages")) if p]
    try:
        return orjson.dumps(parts) if parts else None
    except orjson.JSONEncodeError:  # nested deeper than it writes
        return None
