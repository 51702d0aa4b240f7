"""Whether the local token ids are the engine's: the same probes given to both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from gateway.prompt.chat_template import TemplateFailed
from gateway.prompt.tokenizer import ModelTokenizer

Tokenize = Callable[[dict[str, Any]], Awaitable[list[int]]]
"""Asks a worker's ``POST /tokenize``; takes the body, gives the ids."""

_SPECIAL = "<|im_start|>user <|endoftext|> </s> [INST]"
_MIXED = (
    "  Zwölf Boxkämpfer, 日本語のテキスト, 🙂🏽 naïve\n\n\tdef f(x):\n        return x ** 2\r\n"
)

CHATS: dict[str, list[dict[str, str]]] = {
    "one turn": [{"role": "user", "content": "What is the capital of France?"}],
    "system": [
        {"role": "system", "content": "Answer briefly.\n\nUse no lists."},
        {"role": "user", "content": _MIXED},
    ],
    "turns": [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": " Hi there! "},
        {"role": "user", "content": _SPECIAL},
    ],
    "empty": [{"role": "user", "content": ""}],
}
TEXTS = {"mixed": _MIXED, "special": _SPECIAL, "plain": "The quick brown fox. " * 20}


async def first_mismatch(model: str, local: ModelTokenizer, tokenize: Tokenize) -> str | None:
    """The name of the first probe whose ids differ; None if all are equal.

    Raises what ``tokenize`` raises.
    """
    for name, text in TEXTS.items():
        for special in (True, False):
            body: dict[str, Any] = {
                "model": model,
                "prompt": text,
                "add_special_tokens": special,
            }
            if await tokenize(body) != local.encode(text, special):
                return f"text: {name}"
    for name, messages in CHATS.items():
        for begin in (True, False):
            body = {"model": model, "messages": messages, "add_generation_prompt": begin}
            try:
                ours = local.encode(local.render(list(messages), begin), False)
            except TemplateFailed as error:
                return f"chat: {name}: {error}"
            if await tokenize(body) != ours:
                return f"chat: {name}"
    return None
