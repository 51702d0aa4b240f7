from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.prompt.chat_template import ContentFormat, TemplateFailed
from gateway.prompt.conversation import NotExact, read_conversation
from gateway.prompt.tokenizer import ModelTokenizer, load_tokenizer
from gateway.prompt.trust import FEATURES
from gateway.prompt.verify import PROBES, TEXTS, Probe, Verdict, tokenize_body, verify
from tests.gateway_process import REPOSITORY
from tests.probes import without_feature
from tests.unit.prompt.tiny import TEMPLATE, model_folder

SHOWS_ALL = REPOSITORY / "tests" / "engine" / "tools.jinja"

Ids = list[int] | None
Change = Callable[[dict[str, Any], Ids], Ids]


def same(body: dict[str, Any], ids: Ids) -> Ids:
    return ids


class Worker:
    """`/tokenize` of a worker that has the same tokenizer, but for `change`."""

    def __init__(self, local: ModelTokenizer, change: Change = same) -> None:
        self._local = local
        self._change = change
        self.asked: list[dict[str, Any]] = []

    async def tokenize(self, body: dict[str, Any]) -> Ids:
        self.asked.append(body)
        if "messages" in body:
            return self._change(body, ids_of(self._local, body))
        return self._change(body, self._local.encode(body["prompt"], body["add_special_tokens"]))


def ids_of(local: ModelTokenizer, fields: dict[str, Any]) -> Ids:
    """As a worker reads it, whose template variables may hold the documents."""
    given = dict(fields.get("chat_template_kwargs") or {})
    fields = fields | {"documents": given.pop("documents", fields.get("documents"))}
    try:
        conversation = read_conversation({**fields, "chat_template_kwargs": given}, False)
        return local.encode(local.render(conversation), conversation.special)
    except (TemplateFailed, NotExact):
        return None


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    """With a template that shows everything, given parts."""
    folder = tmp_path_factory.mktemp("model")
    return replace(load_tokenizer(model_folder(folder), SHOWS_ALL), content="openai")


def verdict(local: ModelTokenizer, worker: Worker) -> Verdict:
    return asyncio.run(verify("m", local, worker.tokenize))


def test_like_tokenizers_agree_on_every_probe(local: ModelTokenizer) -> None:
    worker = Worker(local)
    assert verdict(local, worker).failed == {}
    assert len(worker.asked) == 2 * len(TEXTS) + len(PROBES)
    assert all(body["model"] == "m" for body in worker.asked)


@pytest.mark.parametrize("content", ["string", "openai"])
def test_what_a_template_is_given_is_told_by_the_probes(
    local: ModelTokenizer, content: ContentFormat
) -> None:
    for ours in (local, replace(local, content="string")):
        found = verdict(ours, Worker(replace(local, content=content)))
        assert found == Verdict(content, {})


def test_each_feature_has_a_probe() -> None:
    assert {probe.feature for probe in PROBES} == {*FEATURES - {"no_tool_choice"}, None}
    assert len({probe.name for probe in PROBES}) == len(PROBES)


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_a_probe_sees_what_it_is_there_for(local: ModelTokenizer, probe: Probe) -> None:
    read = read_conversation(probe.fields, False)
    assert probe.feature is None or probe.feature in read.features
    ids = ids_of(local, probe.fields)
    assert ids is not None and ids != ids_of(local, without_feature(probe))


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_what_a_worker_is_asked_says_the_same(local: ModelTokenizer, probe: Probe) -> None:
    assert ids_of(local, tokenize_body("m", probe.fields)) == ids_of(local, probe.fields)


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        (lambda body, ids: [*ids, 0], None),
        (
            lambda body, ids: ids[1:] if "prompt" in body and body["add_special_tokens"] else ids,
            None,
        ),
        (lambda body, ids: [*ids, 0] if body.get("add_generation_prompt") is False else ids, None),
        (lambda body, ids: None if len(body.get("messages", [])) == 3 else ids, None),
        (lambda body, ids: [257] * 3 if "<|" in str(body) else ids, None),
        (lambda body, ids: ids[:-1] if "tools" in body else ids, "tools"),
        (lambda body, ids: ids[:-1] if "tool_calls" in str(body) else ids, "tool_calls"),
        (lambda body, ids: ids[:-1] if "documents" in str(body) else ids, "documents"),
        (lambda body, ids: None if body.get("continue_final_message") else ids, "continue"),
    ],
)
def test_any_difference_is_found_and_named(
    local: ModelTokenizer, change: Change, failed: str | None
) -> None:
    found = verdict(local, Worker(local, change)).failed
    assert failed in found
    assert (None in found) == (failed is None)


def test_keys_that_a_worker_leaves_in_another_order_are_seen(local: ModelTokenizer) -> None:
    def reordered(body: dict[str, Any], ids: Ids) -> Ids:
        if "tools" not in body:
            return ids
        conversation = read_conversation(body, False)
        tools = [dict(reversed(tool.items())) for tool in conversation.tools or []]
        return local.encode(local.render(replace(conversation, tools=tools)), False)

    assert "tools" in verdict(local, Worker(local, reordered)).failed


def test_both_may_refuse(tmp_path: Path, local: ModelTokenizer) -> None:
    refuses = TEMPLATE + "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}"
    other = load_tokenizer(model_folder(tmp_path, chat_template=refuses), None)
    assert verdict(other, Worker(other)).failed == {}
    willing = load_tokenizer(model_folder(tmp_path / "willing", chat_template=TEMPLATE), None)
    assert "chat: turns" in verdict(other, Worker(willing)).failed[None]
    assert "chat: turns" in verdict(willing, Worker(other)).failed[None]


def test_a_model_without_a_template_reads_texts(tmp_path: Path, local: ModelTokenizer) -> None:
    bare = load_tokenizer(model_folder(tmp_path / "bare"), None)
    assert verdict(bare, Worker(bare)).failed == {}
    assert None in verdict(bare, Worker(local)).failed


def test_a_worker_that_cannot_be_asked_is_the_caller_s_affair(local: ModelTokenizer) -> None:
    async def broken(body: dict[str, Any]) -> list[int]:
        raise LookupError("away")

    with pytest.raises(LookupError):
        asyncio.run(verify("m", local, broken))
