"""Request bodies that tests send."""

from __future__ import annotations

from typing import Any

from tests.fake_worker import Script

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
FAKE_MODEL = "fake-model"


def chat(text: str = "Say hello.", model: str = FAKE_MODEL, **more: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 5}
    return {**body, **more}


def completion(prompt: Any = "Once upon", model: str = FAKE_MODEL, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": 5, **more}


def response(given: Any = "Say hello.", model: str = FAKE_MODEL, **more: Any) -> dict[str, Any]:
    return {"model": model, "input": given, "max_output_tokens": 5, **more}


def scripted(**script: Any) -> list[tuple[str, str]]:
    """The headers that ask a fake worker for this script; vLLM does not look at them."""
    return [Script(**script).header()]
