from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.prompt.tokenizer import ModelTokenizer, load_tokenizer
from gateway.prompt.verify import CHATS, TEXTS, first_mismatch
from tests.unit.prompt.tiny import TEMPLATE, model_folder

Change = Callable[[dict[str, Any], list[int]], list[int]]


def same(body: dict[str, Any], ids: list[int]) -> list[int]:
    return ids


class Worker:
    """`/tokenize` of a worker that has the same tokenizer, but for `change`."""

    def __init__(self, local: ModelTokenizer, change: Change = same) -> None:
        self._local = local
        self._change = change
        self.asked: list[dict[str, Any]] = []

    async def tokenize(self, body: dict[str, Any]) -> list[int]:
        self.asked.append(body)
        if "messages" in body:
            text = self._local.render(body["messages"], body["add_generation_prompt"])
            return self._change(body, self._local.encode(text, False))
        return self._change(body, self._local.encode(body["prompt"], body["add_special_tokens"]))


@pytest.fixture
def local(tmp_path: Path) -> ModelTokenizer:
    return load_tokenizer(model_folder(tmp_path, chat_template=TEMPLATE), None)


def mismatch(local: ModelTokenizer, worker: Worker) -> str | None:
    return asyncio.run(first_mismatch("m", local, worker.tokenize))


def test_like_tokenizers_agree_on_every_probe(local: ModelTokenizer) -> None:
    worker = Worker(local)
    assert mismatch(local, worker) is None
    assert len(worker.asked) == 2 * (len(TEXTS) + len(CHATS))
    assert all(body["model"] == "m" for body in worker.asked)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda body, ids: [*ids, 0], "text: "),
        (lambda body, ids: ids[1:] if body.get("add_special_tokens") else ids, "text: "),
        (lambda body, ids: ids[:-1] if "messages" in body else ids, "chat: "),
        (lambda body, ids: [*ids, 0] if body.get("add_generation_prompt") else ids, "chat: "),
        (
            lambda body, ids: [] if body.get("messages", [{}])[0].get("role") == "system" else ids,
            "chat: system",
        ),
        (lambda body, ids: [*ids, 0] if len(body.get("messages", [])) == 3 else ids, "chat: turns"),
        (lambda body, ids: [257] * 3 if "<|" in str(body) else ids, "text: special"),
    ],
)
def test_any_difference_is_found_and_named(
    local: ModelTokenizer, change: Change, found: str
) -> None:
    named = mismatch(local, Worker(local, change))
    assert named is not None and named.startswith(found)


def test_a_template_that_fails_is_a_difference(tmp_path: Path, local: ModelTokenizer) -> None:
    refuses = "{% if messages | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
    other = load_tokenizer(model_folder(tmp_path / "other", chat_template=refuses), None)
    named = mismatch(other, Worker(local, lambda body, ids: other_ids(other, body, ids)))
    assert named is not None and "one at a time" in named


def other_ids(other: ModelTokenizer, body: dict[str, Any], ids: list[int]) -> list[int]:
    return other.encode("", False) if len(body.get("messages", [])) == 1 else ids


def test_a_model_without_a_template_is_different(tmp_path: Path, local: ModelTokenizer) -> None:
    bare = load_tokenizer(model_folder(tmp_path / "bare"), None)
    named = mismatch(bare, Worker(local))
    assert named is not None and "no chat template" in named


def test_a_worker_that_cannot_be_asked_is_the_caller_s_affair(local: ModelTokenizer) -> None:
    async def broken(body: dict[str, Any]) -> list[int]:
        raise LookupError("away")

    with pytest.raises(LookupError):
        asyncio.run(first_mismatch("m", local, broken))
