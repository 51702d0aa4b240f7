from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.prompt.canonical import canonical

IMAGE = {"type": "image_url", "image_url": {"url": "data:" + "A" * 10_000}}


def shared(one: bytes, other: bytes) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def of(endpoint: str, **fields: Any) -> bytes:
    found = canonical(endpoint, fields)
    assert found is not None
    return found


@pytest.mark.parametrize("endpoint", ["chat", "messages", "responses"])
def test_what_comes_first_in_a_prompt_comes_first_in_its_bytes(endpoint: str) -> None:
    name = "input" if endpoint == "responses" else "messages"
    first = "instructions" if endpoint == "responses" else "system"
    said = [{"role": "user", "content": "x" * 100}]
    base = of(endpoint, **{name: said, first: "s" * 100, "tools": ["t" * 100]})
    for change, at in (({"tools": ["u"]}, 0), ({first: "u"}, 100), ({name: []}, 200)):
        other = of(endpoint, **{name: said, first: "s" * 100, "tools": ["t" * 100], **change})
        assert at <= shared(base, other) < at + 20


@pytest.mark.parametrize(
    "part",
    [
        IMAGE,
        {"type": "image", "source": {"type": "base64", "data": "A" * 10_000}},
        {"type": "input_audio", "input_audio": {"data": "A" * 10_000}},
        {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]},
    ],
)
def test_what_is_no_text_is_short_and_told_apart(part: dict[str, Any]) -> None:
    def asked(shown: dict[str, Any]) -> bytes:
        return of("chat", messages=[{"role": "user", "content": [shown]}])

    other = json.loads(json.dumps(part).replace("AAAA", "AAAB", 1))
    assert len(asked(part)) < 200
    assert asked(part) == asked(json.loads(json.dumps(part))) != asked(other)


def test_a_picture_is_the_same_whatever_the_order_of_its_keys() -> None:
    pictures = [IMAGE, dict(reversed(IMAGE.items()))]
    one, other = ([{"role": "user", "content": [picture]}] for picture in pictures)
    assert of("chat", messages=one) == of("chat", messages=other)


def test_texts_are_as_they_are() -> None:
    assert of("completions", prompt="é") == "é".encode()
    assert of("completions", prompt="\ud800") == b"\xed\xa0\x80"
    assert b'"text":"x"' in of(
        "chat", messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    )
    assert canonical("chat", {"messages": []}) is None
    assert canonical("responses", {}) is None
