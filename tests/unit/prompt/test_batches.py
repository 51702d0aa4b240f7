from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from gateway.core.blocks import token_bytes
from gateway.prompt import batches as batches_module
from gateway.prompt.batches import BATCH_CHARS, Batches
from gateway.prompt.tokenizer import ModelTokenizer, load_tokenizer
from tests.unit.loopback import run
from tests.unit.prompt.tiny import model_folder
from tests.waiting import until


class Held:
    """A tokenizer that waits for leave before each call, and keeps what it was called with."""

    def __init__(self, local: ModelTokenizer) -> None:
        self.local = local
        self.calls: list[tuple[list[str], bool]] = []
        self.leave = threading.Semaphore(0)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.local.encode(text, add_special_tokens)

    def encode_all(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        self.calls.append((texts, add_special_tokens))
        assert self.leave.acquire(timeout=5)
        if "fail" in texts:
            raise LookupError("cannot be encoded")
        return self.local.encode_all(texts, add_special_tokens)


@pytest.fixture
def held(tmp_path: Path) -> Held:
    return Held(load_tokenizer(model_folder(tmp_path), None))


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Batches]:
    """With one thread, so that there is an order."""
    monkeypatch.setattr(batches_module, "MOST_THREADS", 1)
    made = Batches()
    yield made
    made.close()


def waiting(
    batches: Batches, held: Held, *texts: str, special: bool = False
) -> list[asyncio.Future[list[bytes]]]:
    as_tokenizer = cast(ModelTokenizer, held)
    return [batches.submit(as_tokenizer, [text], special) for text in texts]


def let(held: Held, calls: int) -> None:
    held.leave.release(calls)


def test_each_gets_its_own_ids(batches: Batches, held: Held) -> None:
    async def main() -> None:
        tasks = [
            *waiting(batches, held, "first"),
            *waiting(batches, held, "b", "cc", ""),
            *waiting(batches, held, "b", "d", special=True),
        ]
        let(held, 3)
        found = await asyncio.gather(*tasks)
        plain, special = ["first", "b", "cc", ""], ["b", "d"]
        expected = [held.encode(t, False) for t in plain] + [held.encode(t, True) for t in special]
        assert found == [[token_bytes(ids)] for ids in expected]

    run(main())


def test_several_texts_of_one_stay_in_their_order(batches: Batches, held: Held) -> None:
    async def main() -> None:
        (other,) = waiting(batches, held, "other")
        several = batches.submit(cast(ModelTokenizer, held), ["c", "a", "b"], False)
        (last,) = waiting(batches, held, "last")
        let(held, 2)
        assert await several == [token_bytes(held.encode(text, False)) for text in "cab"]
        assert [len(await each) for each in (other, last)] == [1, 1]

    run(main())


def test_what_comes_while_the_thread_works_is_taken_together(batches: Batches, held: Held) -> None:
    async def main() -> None:
        first = waiting(batches, held, "first")
        later = waiting(batches, held, "a", "b", "c")
        let(held, 2)
        await asyncio.gather(*first, *later)

    run(main())
    assert held.calls == [(["first"], False), (["a", "b", "c"], False)]


def test_a_batch_is_bounded_and_the_first_come_first(batches: Batches, held: Held) -> None:
    long = "x" * BATCH_CHARS

    async def main() -> None:
        tasks = waiting(batches, held, "first", "a", long, "b", long, "c")
        let(held, 4)
        await asyncio.gather(*tasks)

    run(main())
    assert [texts for texts, _ in held.calls] == [["first"], ["a", long], ["b", long], ["c"]]


def test_who_leaves_does_not_hold_up_the_others(batches: Batches, held: Held) -> None:
    async def main() -> None:
        first, gone, stays = waiting(batches, held, "first", "gone", "stays")
        first.cancel()
        gone.cancel()
        await asyncio.sleep(0)
        let(held, 2)
        assert await stays == [token_bytes(held.encode("stays", False))]
        assert first.cancelled() and gone.cancelled()
        again = waiting(batches, held, "again")
        let(held, 1)
        assert await again[0] == [token_bytes(held.encode("again", False))]

    run(main())


def test_a_failure_is_told_and_the_next_batch_goes_on(batches: Batches, held: Held) -> None:
    async def main() -> None:
        fails, later = waiting(batches, held, "fail", "later")
        let(held, 2)
        with pytest.raises(LookupError):
            await fails
        assert await later == [token_bytes(held.encode("later", False))]

    run(main())


def test_several_threads_work_at_once(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        tasks = waiting(batches, held, "a", "b", "c", "d")
        await asyncio.to_thread(until, "two threads work", lambda: len(held.calls) == 2)
        let(held, 4)
        found = await asyncio.gather(*tasks)
        assert found == [[token_bytes(held.encode(text, False))] for text in "abcd"]

    monkeypatch.setattr(batches_module, "MOST_THREADS", 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    batches = Batches()
    run(main())
    batches.close()
    assert [texts for texts, _ in held.calls[:2]] == [["a"], ["b"]]
