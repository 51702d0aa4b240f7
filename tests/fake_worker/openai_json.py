"""The JSON that vLLM writes: field order, absent fields and compact separators as its 0.32 does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

CREATED = 1_700_000_000


def dump(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


def event(value: Any) -> bytes:
    return b"data: " + dump(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def error(message: str, status: int, kind: str, param: str | None = None) -> bytes:
    return dump({"error": {"message": message, "type": kind, "param": param, "code": status}})


def error_event(message: str, status: int, kind: str) -> bytes:
    """An error inside a stream, which vLLM writes with its own separators."""
    value = {"message": message, "type": kind, "param": None, "code": status}
    return b"data: " + json.dumps({"error": value}).encode() + b"\n\n"


@dataclass(frozen=True)
class Generation:
    """One answer to be: what it is about and how long it is."""

    id: str
    model: str
    chat: bool
    choices: int
    tokens: int
    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int

    def usage(self, completion_tokens: int, details: bool) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
        }
        if details:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage

    def plain(self, usage: bool) -> bytes:
        answer = {
            "id": self.id,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": CREATED,
            "model": self.model,
            "choices": [self._plain_choice(i) for i in range(self.choices)],
        }
        if usage:
            answer["usage"] = self.usage(self.tokens * self.choices, details=True)
        return dump(answer)

    def events(self, usage_chunk: bool, continuous: bool) -> list[bytes]:
        """The events of a stream, `[DONE]` included.

        `--enable-force-include-usage` turns on both: a last chunk without choices that carries
        `usage`, and a `usage` on every other chunk too.
        """
        events = []
        if self.chat:
            for i in range(self.choices):
                delta = {"role": "assistant", "content": ""}
                events.append(self._chunk(i, {"delta": delta}, None, 0 if continuous else None))
        for n in range(1, self.tokens + 1):
            finish = self.finish_reason if n == self.tokens else None
            for i in range(self.choices):
                said = {"delta": {"content": self.text}} if self.chat else {"text": self.text}
                events.append(self._chunk(i, said, finish, n if continuous else None))
        if usage_chunk:
            last = self._envelope([])
            last["usage"] = self.usage(self.tokens * self.choices, details=True)
            events.append(event(last))
        return [*events, DONE]

    def _envelope(self, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": CREATED,
            "model": self.model,
            "choices": choices,
        }

    def _chunk(self, i: int, said: dict[str, Any], finish: str | None, done: int | None) -> bytes:
        choice = {"index": i, **said, "logprobs": None, "finish_reason": finish}
        if finish or not self.chat:
            choice["stop_reason"] = None
        chunk = self._envelope([choice])
        if done is not None:
            chunk["usage"] = self.usage(done, details=False)
        return event(chunk)

    def _plain_choice(self, i: int) -> dict[str, Any]:
        text = self.text * self.tokens
        said = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return {
            "index": i,
            **said,
            "logprobs": None,
            "finish_reason": self.finish_reason,
            "stop_reason": None,
        }
