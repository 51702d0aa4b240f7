"""Answers of `/v1/messages` and `/v1/responses` as vLLM 0.32 writes them."""

from __future__ import annotations

import json
from typing import Any

from tests.fake_worker.openai_json import CREATED, Generation, dump


def named(kind: str, value: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: ".encode() + dump(value) + b"\n\n"


class Message(Generation):
    """Anthropic's. An answer that was stopped has no `stop_reason`."""

    def _usage(self, tokens: int) -> dict[str, Any]:
        made = (self.prompt_tokens - self.cached_tokens) // 2
        return {
            "input_tokens": self.prompt_tokens - self.cached_tokens - made,
            "output_tokens": tokens,
            "cache_creation_input_tokens": made,
            "cache_read_input_tokens": self.cached_tokens,
        }

    def _reason(self) -> str | None:
        return {"stop": "end_turn", "length": "max_tokens"}.get(self.finish_reason)

    def _message(self, content: list[Any], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id, "type": "message", "role": "assistant", "content": content,
            "model": self.model, "stop_reason": self._reason(), "usage": usage,
        }  # fmt: skip

    def plain(self, usage: bool) -> bytes:
        text = {"type": "text", "text": self.text * self.tokens}
        answer = self._message([text], self._usage(self.tokens))
        kept = {name: value for name, value in answer.items() if value is not None}
        return json.dumps(kept, separators=(",", ":")).encode()

    def events(self, usage_chunk: bool, continuous: bool) -> list[bytes]:
        started = self._message([], {"input_tokens": self.prompt_tokens, "output_tokens": 0})
        events = [
            named("message_start", {"type": "message_start", "message": started}),
            self._block("start", content_block={"type": "text", "text": ""}),
        ]
        said = {"type": "text_delta", "text": self.text}
        events += [self._block("delta", delta=said) for _ in range(self.tokens)]
        ended = {"stop_reason": self._reason(), "stop_sequence": None}
        last = {"type": "message_delta", "delta": ended, "usage": self._usage(self.tokens)}
        events += [self._block("stop"), named("message_delta", last)]
        return [*events, named("message_stop", {"type": "message_stop"})]

    def _block(self, what: str, **more: Any) -> bytes:
        kind = f"content_block_{what}"
        return named(kind, {"type": kind, **more, "index": 0})

    def failed(self) -> bytes:
        told = {"type": "internal_error", "message": "EngineCore died"}
        return named("error", {"type": "error", "error": told})


class Response(Generation):
    """OpenAI's newer one. The last event of a stream has the whole answer once more."""

    def _response(self, status: str, text: str, usage: Any) -> dict[str, Any]:
        part = {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
        item = {"id": "msg_1", "content": [part], "role": "assistant", "type": "message"}
        return {
            "id": self.id, "created_at": CREATED, "instructions": None, "model": self.model,
            "object": "response", "output": [item] if text else [], "tools": [],
            "status": status, "text": None, "usage": usage, "user": None,
            "input_messages": None, "output_messages": None,
        }  # fmt: skip

    def _whole(self) -> dict[str, Any]:
        usage = {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "cache_write_tokens": 0,
                "input_tokens_per_turn": [],
            },
            "output_tokens": self.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.tokens,
        }
        status = {"stop": "completed", "abort": "cancelled"}.get(self.finish_reason, "incomplete")
        return self._response(status, self.text * self.tokens, usage)

    def plain(self, usage: bool) -> bytes:
        return dump(self._whole())

    def events(self, usage_chunk: bool, continuous: bool) -> list[bytes]:
        begun = self._response("in_progress", "", None)
        told: list[tuple[str, dict[str, Any]]] = [("created", {"response": begun})]
        told += [("output_text.delta", {"delta": self.text})] * self.tokens
        told.append(("completed", {"response": self._whole()}))
        return [
            named(f"response.{kind}", {**event, "sequence_number": n, "type": f"response.{kind}"})
            for n, (kind, event) in enumerate(told)
        ]
