"""Which tokenizer reads which model, by what a worker says of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.prompt.models import Rendering, TokenizerSource
from gateway.prompt.reader import Prompts, Reading
from gateway.prompt.sample import Sampler
from gateway.prompt.tokenizer import ModelTokenizer, load_tokenizer
from tests.unit.prompt.test_verify import SHOWS_ALL, Change, Worker, same
from tests.unit.prompt.tiny import model_folder

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f"}}


class Gateway:
    """What reads prompts, in front of one worker."""

    def __init__(self, folder: Path, change: Change = same, **more: Any) -> None:
        self.local: ModelTokenizer = load_tokenizer(model_folder(folder), SHOWS_ALL)
        self.worker = Worker(self.local, change)
        self.prompts = Prompts()
        self.source = TokenizerSource(self.prompts, Rendering(None, SHOWS_ALL, **more))
        self.base = {"id": "m", "root": str(folder), "parent": None}

    def identify(self, *others: dict[str, Any]) -> None:
        asyncio.run(self.source.prepare([*others, self.base], self.worker.tokenize))

    def read(self, **fields: Any) -> Reading:
        endpoint = "completions" if "prompt" in fields else "chat"
        return asyncio.run(self.prompts.read(endpoint, {"model": "m", **fields}))

    def sampler(self) -> Sampler:
        return Sampler(self.prompts, lambda model: self.worker.tokenize, 60.0)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[list[Gateway]]:
    """Gateways to close in the end."""
    gateways: list[Gateway] = []
    yield gateways
    for gateway in gateways:
        gateway.prompts.close()


@pytest.fixture
def start(tmp_path: Path, made: list[Gateway]) -> Any:
    def start(change: Change = same, **more: Any) -> Gateway:
        made.append(Gateway(tmp_path / "model", change, **more))
        return made[-1]

    return start


def test_a_worker_that_reads_alike_is_read_exactly(start: Any) -> None:
    gateway = start()
    gateway.identify()
    assert gateway.source.modes() == {"m": "exact"}
    assert gateway.source.mismatches() == {"m": 0}
    assert gateway.read(messages=[USER], tools=[TOOL]).fallback is None
    asked = len(gateway.worker.asked)
    gateway.identify()
    assert len(gateway.worker.asked) == asked, "a model is verified once"


def test_a_plain_probe_that_differs_switches_the_model(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = start(lambda body, ids: [*ids, 0] if "prompt" in body else ids)
    gateway.identify()
    assert gateway.source.modes() == {"m": "bytes"}
    assert gateway.source.mismatches()["m"] > 0
    assert gateway.read(messages=[USER]).fallback == "mismatch"
    assert "'text: mixed'" in caplog.text


def test_a_feature_s_probe_that_differs_switches_the_feature(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = start(lambda body, ids: [*ids, 0] if "tools" in body else ids)
    gateway.identify()
    assert gateway.source.modes() == {"m": "exact"}
    assert gateway.read(messages=[USER]).fallback is None
    assert gateway.read(messages=[USER], tools=[TOOL]).fallback == "mismatch"
    assert "'chat: tools'" in caplog.text


def test_all_names_of_a_base_model_are_one(start: Any) -> None:
    gateway = start()
    gateway.identify({**gateway.base, "id": "alias"})
    assert gateway.source.modes() == {"alias": "exact", "m": "exact"}
    one, other = (gateway.read(model=name, messages=[USER]) for name in ("m", "alias"))
    assert one.prompt == other.prompt
    gateway.prompts.answered(one, 1)
    assert gateway.source.modes() == {"alias": "bytes", "m": "bytes"}


def test_adapters_share_the_tokenizer_and_nothing_of_the_cache(start: Any) -> None:
    gateway = start()
    gateway.identify({"id": "adapter", "root": "/nowhere", "parent": "m"})
    assert gateway.source.modes() == {"adapter": "exact", "m": "exact"}
    asked = [{"model": name, "messages": [USER]} for name in ("m", "adapter")]
    base, adapter = (gateway.read(**fields).prompt for fields in asked)
    salted = gateway.read(**asked[1], cache_salt="x").prompt
    assert base.data == adapter.data == salted.data
    assert len({base.extra, adapter.extra, salted.extra}) == 3
    gateway.identify({"id": "later", "root": "/nowhere", "parent": "m"})
    assert gateway.source.modes()["later"] == "exact"


def test_a_model_without_a_folder_is_read_as_bytes(start: Any) -> None:
    gateway = start()
    gateway.base["root"] = "org/name"
    gateway.identify({"id": "adapter", "root": "x", "parent": "m"})
    assert gateway.source.modes() == {"m": "bytes", "adapter": "bytes"}
    assert gateway.source.mismatches() == {}
    assert gateway.read(messages=[USER]).fallback == "no_tokenizer"


def test_what_the_worker_was_started_with_is_followed(start: Any) -> None:
    gateway = start(defaults={"custom": "x"}, drops_tools=True)
    gateway.identify()
    found = gateway.read(messages=[USER], tools=[TOOL], tool_choice="none")
    assert found.fallback == "mismatch", "the worker here has no such defaults"


# --- samples


def test_a_sample_that_is_read_alike_changes_nothing(start: Any) -> None:
    gateway = start()
    gateway.identify()
    sampler = gateway.sampler()
    for fields in (
        {"messages": [{**USER, "content": ["a", "b"]}], "documents": [{"title": "a", "text": "b"}]},
        {"prompt": ["Hi", "other"], "add_special_tokens": False},
    ):
        asyncio.run(sampler.check_all())
        gateway.read(**fields)
        before = len(gateway.worker.asked)
        asyncio.run(sampler.check_all())
        assert len(gateway.worker.asked) == before + 1
    assert gateway.source.mismatches() == {"m": 0}


@pytest.mark.parametrize("times", [1, 2])
def test_a_sample_that_differs_twice_switches_its_kind(start: Any, times: int) -> None:
    """Once may be the date that a template writes."""
    gateway = start()
    gateway.identify()
    wrong = [True] * times

    async def tokenize(body: dict[str, Any]) -> list[int] | None:
        ids = await gateway.worker.tokenize(body)
        return [1, 2] if wrong and wrong.pop() else ids

    sampler = Sampler(gateway.prompts, lambda model: tokenize, 60.0)
    asyncio.run(sampler.check_all())
    gateway.read(messages=[USER], tools=[TOOL])
    asyncio.run(sampler.check_all())
    found = gateway.read(messages=[USER], tools=[TOOL]).fallback
    assert found == (None if times == 1 else "mismatch")
    assert gateway.source.mismatches() == {"m": times - 1}


def test_a_sample_is_let_be_where_nobody_can_be_asked(start: Any) -> None:
    gateway = start()
    gateway.identify()

    async def away(body: dict[str, Any]) -> None:
        return None

    for worker_of in (lambda model: None, lambda model: away):
        sampler = Sampler(gateway.prompts, worker_of, 60.0)
        asyncio.run(sampler.check_all())
        gateway.read(messages=[USER])
        asyncio.run(sampler.check_all())
    assert gateway.source.mismatches() == {"m": 0}


def test_a_sample_that_differs_everywhere_is_a_mismatch_of_messages(start: Any) -> None:
    gateway = start(lambda body, ids: ids and [*ids, 0] if "later" in str(body) else ids)
    gateway.identify()
    sampler = gateway.sampler()
    asyncio.run(sampler.check_all())
    fields = {"model": "m", "messages": [{"role": "user", "content": "later"}], "max_tokens": 1}
    asyncio.run(gateway.prompts.read("messages", fields))
    asyncio.run(sampler.check_all())
    assert asyncio.run(gateway.prompts.read("messages", fields)).fallback == "mismatch"
    assert gateway.read(messages=[USER]).fallback is None
