"""Events followed over real sockets, as they come and as they should not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from gateway.core.blocks import Chain, Prompt, extra_key, token_bytes
from gateway.core.followed import Followed
from gateway.core.options import Options
from gateway.core.placement import POLICIES
from gateway.core.reservation import WorkerId
from gateway.core.router import Router
from gateway.workers import kv_events
from gateway.workers.kv_endpoints import EventEndpoints
from gateway.workers.kv_events import Heard, follow
from tests.fake_worker.kv_events import CLEARED, Event, EventPublisher, removed, stored
from tests.unit.loopback import eventually, run

A = WorkerId("a")
SIZE = 4
IDS = list(range(1, 401))


@pytest.fixture
def engine() -> Iterator[EventPublisher]:
    with EventPublisher() as publisher:
        yield publisher


class Follows:
    """A router that follows one engine."""

    def __init__(self) -> None:
        self.router = Router(Options(policy=POLICIES["least_work"]))
        self.router.add_worker(A)
        self.heard = Heard()

    @property
    def followed(self) -> Followed:
        return self.router.caches.followed[A]

    def leading(self, extra: bytes = b"") -> int:
        """Blocks known of the one prompt that the tests are about."""
        of: Chain = Prompt(token_bytes(IDS), True, extra).chain(SIZE)
        return self.followed.cache.leading(of.hashes, len(of.hashes), {})

    async def until(self, blocks: int, trusted: bool = True) -> None:
        await eventually(
            f"{blocks} blocks are known",
            lambda: (self.leading(), self.followed.trusted) == (blocks, trusted),
        )


@asynccontextmanager
async def following(
    engine: EventPublisher, replay: bool = True, bound: bool = False
) -> AsyncIterator[Follows]:
    made = Follows()
    endpoints = EventEndpoints(engine.url, engine.replay_url if replay else None, bound)
    task = asyncio.create_task(follow(made.router.caches, A, endpoints, made.heard))
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def blocks(first: int, last: int) -> Event:
    """Blocks of the prompt, named by their numbers."""
    return stored(
        list(range(first, last)),
        first - 1 if first else None,
        IDS[SIZE * first : SIZE * last],
        SIZE,
    )


async def joined(made: Follows, engine: EventPublisher) -> None:
    """Both sockets are connected: what is published now is heard."""
    await eventually("it is followed", lambda: made.followed.alive)
    before = made.heard.lag_seconds
    while made.heard.lag_seconds == before:
        engine.publish({"type": "Nothing"})
        await asyncio.sleep(0.005)
    await eventually("nothing is missing", lambda: made.followed.batches == engine.next)


def test_what_the_engine_does_is_known(engine: EventPublisher) -> None:
    async def main() -> None:
        async with following(engine) as made:
            await joined(made, engine)
            engine.publish(blocks(0, 5), blocks(5, 8))
            await made.until(8)
            engine.publish(removed([7]), removed([6]))
            await made.until(6)
            engine.publish(CLEARED, blocks(0, 2))
            await made.until(2)
            assert made.heard.lag_seconds is not None and 0 <= made.heard.lag_seconds < 2
            assert (made.heard.gaps, made.followed.resets) == (0, 0)

    run(main())


def test_what_happened_before_is_replayed(engine: EventPublisher) -> None:
    engine.publish(blocks(0, 5))
    engine.publish(removed([4]))

    async def main() -> None:
        async with following(engine) as made:
            await made.until(4)
            await joined(made, engine)
            engine.publish(blocks(4, 6))
            await made.until(6)
            assert made.heard.gaps == 0

    run(main())


def test_an_idle_engine_is_known_to_hold_nothing(engine: EventPublisher) -> None:
    async def main() -> None:
        async with following(engine) as made:
            await made.until(0)

    run(main())


def test_a_lost_batch_is_replayed(engine: EventPublisher) -> None:
    async def main() -> None:
        async with following(engine) as made:
            await joined(made, engine)
            engine.publish(blocks(0, 3))
            lost = engine.publish(blocks(3, 5), lost=True)
            engine.publish(blocks(5, 6))
            await made.until(6)
            engine.send_again(lost)
            engine.publish(blocks(6, 7))
            await made.until(7)
            assert (made.heard.gaps, made.heard.replays) == (1, 2)
            assert (made.followed.resets, made.followed.cache.copies) == (0, 7)
            assert engine.asked[-1] == lost - 1

    run(main())


def test_a_batch_lost_for_good_ends_the_trust_until_the_cache_is_cleared(
    engine: EventPublisher,
) -> None:
    async def main() -> None:
        async with following(engine) as made:
            await joined(made, engine)
            engine.publish(blocks(0, 3))
            engine.publish(blocks(3, 5), lost=True, kept=False)
            engine.publish(blocks(5, 6))
            await eventually("it is given up", lambda: made.followed.resets == 1)
            await made.until(0, trusted=False)
            assert made.followed.cache.untranslated == 1
            engine.publish(blocks(0, 2))
            await made.until(2, trusted=False)
            engine.publish(CLEARED, blocks(0, 4))
            await made.until(4)

    run(main())


def test_without_replays_a_gap_ends_the_trust(engine: EventPublisher) -> None:
    async def main() -> None:
        async with following(engine, replay=False) as made:
            while not made.followed.alive:
                engine.publish(CLEARED)
                await asyncio.sleep(0.005)
            engine.publish(blocks(0, 3))
            await made.until(3)
            engine.publish(blocks(3, 4), lost=True)
            engine.publish(blocks(4, 5))
            await made.until(0, trusted=False)

    run(main())


def test_a_mute_replay_is_given_up(engine: EventPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_REPLAY_SECONDS", 0.1)

    async def main() -> None:
        async with following(engine) as made:
            await joined(made, engine)
            engine.mute_replays = True
            engine.publish(blocks(0, 1), lost=True)
            engine.publish(blocks(1, 2))
            await eventually("it is given up", lambda: made.followed.resets == 1)

    run(main())


def test_a_batch_that_cannot_be_read_is_a_gap(engine: EventPublisher) -> None:
    async def main() -> None:
        async with following(engine) as made:
            await joined(made, engine)
            engine.publish(blocks(0, 3))
            engine.publish(raw=b"\xc1")
            engine.publish(blocks(3, 4))
            await eventually("it is given up", lambda: made.followed.resets == 1)
            assert made.heard.undecodable == 2  # as published, and as replayed
            assert made.heard.gaps == 1

    run(main())


def test_another_engine_at_the_same_address_begins_empty(engine: EventPublisher) -> None:
    async def main() -> None:
        async with following(engine) as made:
            await joined(made, engine)
            engine.publish(blocks(0, 5))
            await made.until(5)
            await asyncio.to_thread(engine.restart)
            while made.leading() != 2:
                engine.publish(blocks(0, 2))
                await asyncio.sleep(0.005)
            await eventually("nothing is missing", lambda: made.followed.trusted)
            assert made.followed.resets == 0

    run(main())


def test_a_replay_that_begins_late_tells_what_it_can(engine: EventPublisher) -> None:
    engine.publish(blocks(0, 2))
    engine.publish(CLEARED, blocks(0, 3))
    engine.publish(blocks(3, 4))
    engine.forget(below=1)

    async def main() -> None:
        async with following(engine) as made:
            await made.until(4)  # the cache was cleared since: nothing that was missed matters

    run(main())


def test_the_engine_may_connect_to_us() -> None:
    with EventPublisher() as spare:
        address = spare.url  # a port that is free again when the publisher has ended

    async def main() -> None:
        with EventPublisher(connect_to=address) as engine:
            async with following(engine, bound=True) as made:
                await joined(made, engine)
                engine.publish(blocks(0, 3))
                await made.until(3)

    run(main())


def test_large_batches_leave_the_loop_its_turns(engine: EventPublisher) -> None:
    ids = list(range(128_000))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with following(engine) as made:
            await joined(made, engine)
            engine.publish(stored(list(range(8_000)), None, ids, 16))
            longest, last = 0.0, loop.time()
            while made.followed.cache.copies < 8_000:
                await asyncio.sleep(0)
                longest, last = max(longest, loop.time() - last), loop.time()
            print(f"longest turn {longest * 1000:.1f} ms")
            assert longest < 0.1, "most of it is the decoding, which is one step"

    run(main())


def test_salts_are_told_apart(engine: EventPublisher) -> None:
    engine.publish({**blocks(0, 3), "extra_keys": [["me"], None, None]})

    async def main() -> None:
        async with following(engine) as made:
            await eventually("it is known", lambda: made.leading(extra_key(None, "me")) == 3)
            assert made.leading() == 0

    run(main())


def test_an_address_that_cannot_be_used_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        made = Follows()
        await follow(made.router.caches, A, EventEndpoints("nonsense"), made.heard)
        assert not made.followed.trusted

    run(main())
    assert "followed no more" in caplog.text
