from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gateway.upstream import pool as pool_module
from gateway.upstream.errors import ConnectFailed
from gateway.upstream.exchange import Exchange
from gateway.upstream.pool import Pool
from tests.unit.loopback import Peer, eventually, limits, run, serving

GET = b"GET / HTTP/1.1\r\nhost: w\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def answers_ok(peer: Peer) -> None:
    while True:
        await peer.request()
        await peer.say(OK)


async def get(pool: Pool) -> bytes:
    exchange = Exchange(pool)
    try:
        await exchange.open(GET, b"")
        data = b""
        while piece := await exchange.read():
            data += piece
        return data
    finally:
        exchange.close()


@contextmanager
def mute_listener() -> Iterator[str]:
    """The address of a server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


# --- the address


@pytest.mark.parametrize(
    ("url", "authority", "prefix"),
    [
        ("http://worker:8001", b"worker:8001", b""),
        ("http://worker/", b"worker", b""),
        ("http://worker:8001/base/path/", b"worker:8001", b"/base/path"),
        ("https://user:secret@worker:8001", b"worker:8001", b""),
        ("http://[::1]:8001", b"[::1]:8001", b""),
    ],
)
def test_an_address_is_understood(url: str, authority: bytes, prefix: bytes) -> None:
    pool = Pool(url, limits(connect_seconds=1))
    assert (pool.authority, pool.prefix) == (authority, prefix)


@pytest.mark.parametrize("url", ["", "worker:8001", "ftp://worker", "http://", "http:///path"])
def test_another_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not an http or https address"):
        Pool(url, limits(connect_seconds=1))


# --- connecting


def test_a_refused_connection_is_told_and_not_counted() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        pool = Pool(f"http://127.0.0.1:{unused.getsockname()[1]}", limits())

        with pytest.raises(ConnectFailed) as raised:
            run(pool.connect())
    assert not raised.value.processed
    assert str(raised.value)
    assert (pool.active, pool.idle) == (0, 0)


def test_a_name_that_is_nobody_s_is_a_failed_connection() -> None:
    pool = Pool("http://no-such-worker.invalid:1", limits())
    with pytest.raises(ConnectFailed):
        run(pool.connect())
    assert pool.active == 0


def test_the_connect_limit_holds_for_the_tls_handshake_too() -> None:
    with mute_listener() as address:
        pool = Pool(f"https://{address}", limits(connect_seconds=0.05))
        with pytest.raises(ConnectFailed, match=r"within 0\.05 s"):
            run(pool.connect())
        assert pool.active == 0


def test_a_worker_that_speaks_no_tls_is_a_failed_connection() -> None:
    async def speaks_first(peer: Peer) -> None:
        await peer.say(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async def main() -> int:
        async with serving(speaks_first) as served:
            pool = Pool(served.url.replace("http:", "https:"), limits())
            with pytest.raises(ConnectFailed):
                await pool.connect()
            return pool.active

    assert run(main()) == 0


def test_a_cancelled_connect_is_not_counted() -> None:
    async def main(address: str) -> int:
        pool = Pool(f"https://{address}", limits())
        task = asyncio.create_task(pool.connect())
        await asyncio.sleep(0)
        assert pool.active == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pool.active

    with mute_listener() as address:
        assert run(main(address)) == 0


def test_small_requests_are_not_held_back() -> None:
    async def main() -> int:
        async with serving(answers_ok) as served:
            pool = Pool(served.url, limits())
            connection = await pool.connect()
            sock = connection.transport.get_extra_info("socket")
            delay = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            pool.release(connection)
            return delay

    assert run(main()) != 0


def test_tls_is_verified() -> None:
    tls = Pool("https://worker", limits(connect_seconds=1))._tls
    assert tls is not None
    assert (tls.verify_mode, tls.check_hostname) == (ssl.CERT_REQUIRED, True)


# --- keeping


def test_connections_are_reused_the_last_one_first() -> None:
    async def main() -> None:
        async with serving(answers_ok) as served:
            pool = Pool(served.url, limits())
            assert await asyncio.gather(*(get(pool) for _ in range(3))) == [b"ok"] * 3
            assert (pool.active, pool.idle, len(served.peers)) == (0, 3, 3)
            first, second = pool.reuse(), pool.reuse()
            assert first is not None and second is not None
            assert first.idle_since >= second.idle_since
            assert (pool.active, pool.idle) == (2, 1)
            for connection in (second, first):
                connection.reusable = True
                pool.release(connection)
            for _ in range(5):
                assert await get(pool) == b"ok"
            assert len(served.peers) == 3
            pool.close_idle()
            assert (pool.active, pool.idle) == (0, 0)

    run(main())


def test_a_connection_that_is_not_reusable_is_closed() -> None:
    async def closes(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok")
        await peer.gone()
        gone.set()

    async def main() -> None:
        async with serving(closes) as served:
            pool = Pool(served.url, limits())
            assert await get(pool) == b"ok"
            assert (pool.active, pool.idle) == (0, 0)
            await gone.wait()

    gone = asyncio.Event()
    run(main())


def test_a_connection_that_the_worker_has_closed_is_not_reused() -> None:
    async def once(peer: Peer) -> None:
        seen.append(await peer.request())
        await peer.say(OK)

    async def main() -> None:
        async with serving(once) as served:
            pool = Pool(served.url, limits())
            for turn in range(3):
                assert await get(pool) == b"ok"
                kept = pool._idle[-1]
                await eventually("the worker's FIN arrives", lambda kept=kept: kept.closed)
                assert len(seen) == turn + 1
            pool.close_idle()

    seen: list[bytes] = []
    run(main())


def test_idle_connections_are_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def counts(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK)
        await peer.gone()
        gone.append(peer.number)

    async def main() -> None:
        async with serving(counts) as served:
            pool = Pool(served.url, limits())
            await asyncio.gather(*(get(pool) for _ in range(3)))
            assert pool.idle == 3
            await eventually("all idle connections are closed", lambda: len(gone) == 3)
            assert (pool.active, pool.idle) == (0, 0)

    gone: list[int] = []
    monkeypatch.setattr(pool_module, "IDLE_SECONDS", 0.05)
    run(main())


def test_a_connection_in_use_does_not_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(answers_ok) as served:
            pool = Pool(served.url, limits())
            await asyncio.gather(get(pool), get(pool))
            used = pool.reuse()
            await eventually("the other one expires", lambda: pool.idle == 0)
            assert used is not None and not used.closed
            pool.release(used)

    monkeypatch.setattr(pool_module, "IDLE_SECONDS", 0.05)
    run(main())


def test_idle_connections_are_kept_shorter_than_vllm_keeps_them() -> None:
    assert pool_module.IDLE_SECONDS < 5.0, "uvicorn closes after 5 s"
