"""One request and its answer over real sockets, to every kind of end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.upstream.errors import (
    BadAnswer,
    ConnectFailed,
    HeadTimeout,
    IdleTimeout,
    NoAnswer,
    Truncated,
    UpstreamError,
)
from gateway.upstream.exchange import HIGH_WATER_BYTES, Exchange
from gateway.upstream.pool import Pool
from tests.unit.loopback import Peer, eventually, limits, run, serving
from tests.unit.upstream.answers import ANSWERS, Answer
from tests.unit.upstream.test_pool import mute_listener

POST = b"POST /v1/completions HTTP/1.1\r\nhost: w\r\ncontent-length: 4\r\n\r\n"
BODY = b"body"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Ended(Exchange):
    """Tells when the answer's end has come, read or not."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.over = asyncio.Event()

    def end(self, error: UpstreamError | None) -> None:
        super().end(error)
        self.over.set()


async def rest(exchange: Exchange) -> bytes:
    pieces = []
    while piece := await exchange.read():
        pieces.append(piece)
    return b"".join(pieces)


async def diverted(exchange: Exchange) -> bytes:
    pieces: list[bytes] = []
    await exchange.divert(pieces.append)
    return b"".join(pieces) + await rest(exchange)


Reader = Callable[[Exchange], Awaitable[bytes]]
READERS = pytest.mark.parametrize("reader", [rest, diverted], ids=["read", "divert"])


async def ask(pool: Pool, reader: Reader = rest) -> tuple[Exchange, bytes]:
    exchange = Exchange(pool)
    try:
        await exchange.open(POST, BODY)
        return exchange, await reader(exchange)
    finally:
        exchange.close()


async def ask_one(script: Callable[[Peer], Awaitable[None]], reader: Reader = rest) -> bytes:
    """One exchange with a worker of that script; whatever happens nothing is left active."""
    async with serving(script) as served:
        pool = Pool(served.url, limits())
        try:
            return (await ask(pool, reader))[1]
        finally:
            assert pool.active == 0
            pool.close_idle()


# --- answers


@READERS
@pytest.mark.parametrize("answer", ANSWERS, ids=str)
@pytest.mark.parametrize("piece_bytes", [1, 7, 1 << 20])
def test_answers_arrive_as_they_were_made(answer: Answer, piece_bytes: int, reader: Reader) -> None:
    async def script(peer: Peer) -> None:
        while True:
            assert await peer.request() == POST + BODY
            data = answer.data
            await peer.say(*(data[i : i + piece_bytes] for i in range(0, len(data), piece_bytes)))
            if answer.eof:
                return

    async def main() -> None:
        async with serving(script) as served:
            pool = Pool(served.url, limits())
            for _ in range(2):
                exchange, body = await ask(pool, reader)
                assert (exchange.status, body) == (answer.status, answer.body)
                assert tuple(exchange.headers) == answer.headers
                assert (pool.active, pool.idle) == (0, answer.reusable)
            assert len(served.peers) == (1 if answer.reusable else 2)
            pool.close_idle()

    run(main())


@settings(max_examples=25)
@given(st.data(), st.sampled_from(ANSWERS))
def test_answers_in_any_writes(data: st.DataObject, answer: Answer) -> None:
    places = sorted(data.draw(st.sets(st.integers(1, len(answer.data) - 1), max_size=6)))

    async def script(peer: Peer) -> None:
        await peer.request()
        for start, end in zip([0, *places], [*places, len(answer.data)], strict=True):
            await peer.say(answer.data[start:end])
            await asyncio.sleep(0)
        if not answer.eof:
            await peer.gone()

    assert run(ask_one(script)) == answer.body


def test_the_head_is_there_before_the_body() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(CHUNKED)
        await body_wanted.wait()
        await peer.say(chunk(b"late"), chunk(b""))
        await peer.gone()

    async def main() -> None:
        async with serving(script) as served:
            exchange = Exchange(Pool(served.url, limits()))
            await exchange.open(POST, BODY)
            assert exchange.status == 200
            assert not exchange.readable and not exchange.complete
            body_wanted.set()
            await eventually("the body has come", lambda: exchange.readable)
            assert await rest(exchange) == b"late"
            assert exchange.readable and exchange.complete
            exchange.close()

    body_wanted = asyncio.Event()
    run(main())


def test_a_worker_that_dies_between_head_and_body_has_not_answered() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(CHUNKED)
        peer.reset()

    with pytest.raises(Truncated):
        run(ask_one(script))


def test_silence_behind_the_head_has_the_idle_limit() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(CHUNKED)
        await peer.gone()

    async def main() -> None:
        async with serving(script) as served:
            pool = Pool(served.url, limits(idle_seconds=0.05))
            with pytest.raises(IdleTimeout):
                await ask(pool)
            assert (pool.active, pool.idle) == (0, 0)

    run(main())


def test_head_is_answered_without_a_body() -> None:
    async def script(peer: Peer) -> None:
        assert (await peer.request()).startswith(b"HEAD / ")
        await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
        await peer.gone()

    async def main() -> None:
        async with serving(script) as served:
            pool = Pool(served.url, limits())
            exchange = Exchange(pool)
            await exchange.open(b"HEAD / HTTP/1.1\r\nhost: w\r\n\r\n", b"")
            assert await exchange.read() == b""
            exchange.close()
            assert (exchange.status, pool.active, pool.idle) == (200, 0, 0)

    run(main())


@READERS
def test_a_big_body_arrives_whole(reader: Reader) -> None:
    body = bytes(range(256)) * 40_000

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body), body)
        await peer.gone()

    assert run(ask_one(script, reader)) == body


def test_each_piece_is_handed_on_before_the_next_is_made() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(CHUNKED)
        for n in range(5):
            await peer.say(chunk(b"%d" % n))
            await arrived.get()
        await peer.say(chunk(b""))
        await peer.gone()

    async def reader(exchange: Exchange) -> bytes:
        await exchange.divert(arrived.put_nowait)
        return b""

    arrived: asyncio.Queue[bytes] = asyncio.Queue()
    run(ask_one(script, reader))


# --- failures


def says(*pieces: bytes, reset: bool = False) -> Callable[[Peer], Awaitable[None]]:
    """A worker that answers each request with that and closes the connection."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(*pieces)
        if reset:
            peer.reset()

    return script


@READERS
@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([], NoAnswer),
        ([b"HTTP/1.1 200 OK\r\ncontent-"], NoAnswer),
        ([b"HTTP/1.1 100 Continue\r\n\r\n"], NoAnswer),
        ([OK[:-1]], Truncated),
        ([CHUNKED], Truncated),
        ([CHUNKED, chunk(b"half"), b"5\r\nhe"], Truncated),
        ([CHUNKED, chunk(b"all but the last")], Truncated),
        ([b"noise\r\n\r\n"], BadAnswer),
        ([b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000], BadAnswer),
        ([CHUNKED, b"zz\r\n"], BadAnswer),
    ],
)
def test_a_broken_answer_is_an_error(
    pieces: list[bytes], error: type[UpstreamError], reset: bool, reader: Reader
) -> None:
    with pytest.raises(error) as raised:
        run(ask_one(says(*pieces, reset=reset), reader))
    assert raised.value.processed


@READERS
def test_what_came_before_a_failure_is_handed_out_first(reader: Reader) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(CHUNKED, chunk(b"first"), chunk(b"second"))

    async def main() -> None:
        async with serving(script) as served:
            exchange = Ended(Pool(served.url, limits()))
            await exchange.open(POST, BODY)
            await exchange.over.wait()
            assert not exchange.complete
            pieces: list[bytes] = []
            with pytest.raises(Truncated):
                if reader is rest:
                    while True:
                        pieces.append(await exchange.read())
                await exchange.divert(pieces.append)
            assert b"".join(pieces) == b"firstsecond"
            exchange.close()

    run(main())


def test_nobody_there_is_not_processed() -> None:
    async def main() -> None:
        async with serving(says()) as served:
            pool = Pool(served.url, limits())
        with pytest.raises(ConnectFailed) as raised:
            await ask(pool)
        assert not raised.value.processed
        assert pool.active == 0

    run(main())


# --- reuse


def test_a_stale_connection_is_replaced_once_by_a_fresh_one() -> None:
    async def script(peer: Peer) -> None:
        requests.append(await peer.request())
        await peer.say(OK)
        if peer.number == 0:
            await peer.request()  # and closes without a word
            return
        await peer.gone()

    async def main() -> None:
        async with serving(script) as served:
            pool = Pool(served.url, limits())
            for _ in range(2):
                assert (await ask(pool))[1] == b"ok"
                assert (pool.active, pool.idle) == (0, 1)
            assert len(served.peers) == 2
            pool.close_idle()

    requests: list[bytes] = []
    run(main())
    assert requests == [POST + BODY] * 2


def test_a_fresh_connection_that_dies_too_is_not_replaced() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        if peer.number == 0:
            await peer.say(OK)
            await peer.request()

    async def main() -> None:
        async with serving(script) as served:
            pool = Pool(served.url, limits())
            await ask(pool)
            with pytest.raises(NoAnswer) as raised:
                await ask(pool)
            assert raised.value.processed, "it may have had the whole request"
            assert (pool.active, pool.idle, len(served.peers)) == (0, 0, 2)

    run(main())


def test_a_stale_connection_where_nobody_listens_any_more() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK)
        await peer.request()

    async def main() -> None:
        async with serving(script) as served:
            pool = Pool(served.url, limits())
            await ask(pool)
        with pytest.raises(ConnectFailed):
            await ask(pool)
        assert (pool.active, pool.idle) == (0, 0)

    run(main())


# --- limits


async def mute(peer: Peer) -> None:
    await peer.request()
    await peer.gone()


async def stalls(peer: Peer) -> None:
    await peer.request()
    await peer.say(CHUNKED, chunk(b"some"))
    await peer.gone()


def test_no_head_within_the_limit() -> None:
    async def main() -> None:
        async with serving(mute) as served:
            pool = Pool(served.url, limits(head_seconds=0.05))
            exchange = Exchange(pool)
            with pytest.raises(HeadTimeout, match=r"0\.05 s"):
                await exchange.open(POST, BODY)
            exchange.close()
            assert (pool.active, pool.idle) == (0, 0)

    run(main())


@READERS
def test_silence_in_a_body_is_limited(reader: Reader) -> None:
    async def main() -> None:
        async with serving(stalls) as served:
            pool = Pool(served.url, limits(idle_seconds=0.05))
            exchange = Exchange(pool)
            await exchange.open(POST, BODY)
            with pytest.raises(IdleTimeout, match=r"0\.05 s"):
                await reader(exchange)
            exchange.close()
            assert (pool.active, pool.idle) == (0, 0)

    run(main())


@READERS
def test_a_slow_answer_that_goes_on_is_not_silent(reader: Reader) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(CHUNKED)
        never = asyncio.Event()
        for _ in range(15):
            await peer.say(chunk(b"x"))
            with suppress(TimeoutError):
                await asyncio.wait_for(never.wait(), 0.02)
        await peer.say(chunk(b""))
        await peer.gone()

    async def main() -> None:
        async with serving(script) as served:
            pool = Pool(served.url, limits(head_seconds=0.2, idle_seconds=0.2))
            exchange = Exchange(pool)
            await exchange.open(POST, BODY)
            assert await reader(exchange) == b"x" * 15
            exchange.close()
            pool.close_idle()

    run(main())


# --- back-pressure


class Flood:
    """A worker with more to say than a reader takes; knows whether it is held up."""

    total_bytes = 24 << 20

    def __init__(self) -> None:
        self.held_up = asyncio.Event()
        self.finished = asyncio.Event()
        self.peer_gone = asyncio.Event()

    async def __call__(self, peer: Peer) -> None:
        await peer.request()
        peer.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % self.total_bytes)
        piece = b"x" * (1 << 20)
        try:
            for _ in range(self.total_bytes >> 20):
                peer.writer.write(piece)
                drained = asyncio.ensure_future(peer.writer.drain())
                await asyncio.wait([drained], timeout=0.1)
                if not drained.done():
                    self.held_up.set()
                await drained
            self.finished.set()
            await peer.gone()
        finally:
            self.peer_gone.set()

    async def is_held_up(self) -> bool:
        """Which comes first: that nobody takes any more, or that all has been taken."""
        waits = [asyncio.ensure_future(e.wait()) for e in (self.held_up, self.finished)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return not self.finished.is_set()


def test_a_reader_that_does_not_read_holds_up_the_worker() -> None:
    async def main() -> None:
        flood = Flood()
        async with serving(flood) as served:
            pool = Pool(served.url, limits())
            exchange = Exchange(pool)
            await exchange.open(POST, BODY)
            assert await flood.is_held_up()
            first = await exchange.read()
            assert HIGH_WATER_BYTES < len(first) < 4 * HIGH_WATER_BYTES
            assert len(first + await rest(exchange)) == flood.total_bytes
            exchange.close()
            assert (pool.active, pool.idle) == (0, 1)
            pool.close_idle()

    run(main())


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_slow_client_pauses_what_is_handed_on(when: str) -> None:
    async def main() -> None:
        flood = Flood()
        sizes: list[int] = []

        def forward(data: bytes) -> None:
            sizes.append(len(data))
            if when == "within" and len(sizes) == 2:
                exchange.pause()

        async with serving(flood) as served:
            pool = Pool(served.url, limits(idle_seconds=0.05))
            exchange = Exchange(pool)
            await exchange.open(POST, BODY)
            if when == "before":
                exchange.pause()
            task = asyncio.create_task(exchange.divert(forward))
            assert await flood.is_held_up()
            taken = sum(sizes)
            await asyncio.wait([task], timeout=0.2)
            assert not task.done(), "a reader that waits is no silent worker"
            assert sum(sizes) == taken
            exchange.resume()
            await task
            assert sum(sizes) + len(await rest(exchange)) == flood.total_bytes
            exchange.close()
            pool.close_idle()

    run(main())


def test_a_paused_exchange_that_is_given_up_frees_the_worker() -> None:
    async def main() -> None:
        flood = Flood()
        async with serving(flood) as served:
            pool = Pool(served.url, limits())
            exchange = Exchange(pool)
            await exchange.open(POST, BODY)
            assert await flood.is_held_up()
            exchange.close()
            assert (pool.active, pool.idle) == (0, 0)
            await flood.peer_gone.wait()

    run(main())


def test_a_connection_paused_at_its_answer_s_end_reads_again_when_reused() -> None:
    body = b"x" * (HIGH_WATER_BYTES + 1)

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
            await peer.say(head + body)

    async def main() -> None:
        async with serving(script) as served:
            pool = Pool(served.url, limits())
            exchange = Ended(pool)
            await exchange.open(POST, BODY)
            await exchange.over.wait()
            exchange.close()
            assert (pool.active, pool.idle) == (0, 1)
            assert (await ask(pool))[1] == body
            assert len(served.peers) == 1
            pool.close_idle()

    run(main())


# --- who leaves


async def cancelled(pool: Pool, begun: Callable[[], Awaitable[object]], reader: Reader) -> None:
    """A request whose task is cancelled once `begun` has happened."""
    task = asyncio.create_task(ask(pool, reader))
    await begun()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_cancelled_while_it_connects() -> None:
    async def main(address: str) -> None:
        pool = Pool(f"https://{address}", limits())
        await cancelled(pool, lambda: eventually("it connects", lambda: pool.active), rest)
        assert (pool.active, pool.idle) == (0, 0)

    with mute_listener() as address:
        run(main(address))


@READERS
@pytest.mark.parametrize("phase", ["head", "body", "between chunks", "reused"])
def test_cancelled_while_it_waits(phase: str, reader: Reader) -> None:
    async def script(peer: Peer) -> None:
        if phase == "reused":
            await peer.request()
            await peer.say(OK)
        await peer.request()
        if phase in ("body", "between chunks"):
            await peer.say(CHUNKED)
        if phase == "between chunks":
            await peer.say(chunk(b"some"))
        begun.set()
        await peer.gone()
        freed.set()

    async def main() -> None:
        async with serving(script) as served:
            pool = Pool(served.url, limits())
            if phase == "reused":
                await ask(pool)
                assert pool.idle == 1
            await cancelled(pool, begun.wait, reader)
            assert (pool.active, pool.idle) == (0, 0)
            await freed.wait()

    begun, freed = asyncio.Event(), asyncio.Event()
    run(main())


def test_cancelled_at_any_moment() -> None:
    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.say(CHUNKED, chunk(b"a"))
            await asyncio.sleep(0)
            await peer.say(chunk(b"b"), chunk(b""))

    async def main() -> None:
        async with serving(script) as served:
            pool = Pool(served.url, limits())
            finished = 0
            for moment in range(60):
                task = asyncio.create_task(ask(pool, diverted if moment % 2 else rest))
                for _ in range(moment // 2):
                    await asyncio.sleep(0)
                task.cancel()
                try:
                    assert (await task)[1] == b"ab"
                    finished += 1
                except asyncio.CancelledError:
                    pass
                assert pool.active == 0
            assert 0 < finished < 60, "some moments are before the end and some behind it"
            assert (await ask(pool))[1] == b"ab"
            pool.close_idle()

    run(main())
