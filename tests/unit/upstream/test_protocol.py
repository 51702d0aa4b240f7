"""One connection, fed by hand: each answer in every split of its bytes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstream.errors import (
    BadAnswer,
    NoAnswer,
    StaleConnection,
    Truncated,
    UpstreamError,
)
from gateway.upstream.protocol import MAX_HEAD_BYTES, Connection, Headers
from tests.unit.upstream.answers import ANSWERS, Answer

GET = b"GET / HTTP/1.1\r\nhost: w\r\n\r\n"
HEAD = b"HEAD / HTTP/1.1\r\nhost: w\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Transport:
    """Remembers what a connection did to it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.aborted = False
        self.reading = True

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def abort(self) -> None:
        self.aborted = True

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, Connection), "it is only ever told of itself again"

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


@dataclass
class Seen:
    """A sink; `events` are the names in their order, of several bodies one."""

    status: int = 0
    headers: Headers = field(default_factory=list)
    data: bytes = b""
    error: UpstreamError | None = None
    events: list[str] = field(default_factory=list)

    def head(self, status: int, headers: Headers) -> None:
        self.events.append("head")
        self.status, self.headers = status, headers

    def body(self, data: bytes) -> None:
        assert data
        if self.events[-1] != "body":
            self.events.append("body")
        self.data += data

    def end(self, error: UpstreamError | None) -> None:
        self.events.append("end")
        self.error = error


def connected() -> tuple[Connection, Transport]:
    connection, transport = Connection(), Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection, transport


def fed(pieces: list[bytes], request: bytes = GET) -> tuple[Connection, Seen]:
    connection, _ = connected()
    seen = Seen()
    connection.start(request, b"", seen)
    for piece in pieces:
        if not connection.closed:
            connection.data_received(piece)
    return connection, seen


def split_at(data: bytes, *places: int) -> list[bytes]:
    edges = sorted({0, len(data), *places})
    return [data[a:b] for a, b in pairwise(edges)]


def each_split(data: bytes) -> list[list[bytes]]:
    return [split_at(data, at) for at in range(len(data))] + [split_at(data, *range(len(data)))]


def check(answer: Answer, pieces: list[bytes]) -> None:
    connection, seen = fed(pieces)
    if answer.eof:
        assert "end" not in seen.events
        connection.connection_lost(None)
    assert seen.events == (["head", "body", "end"] if answer.body else ["head", "end"])
    assert (seen.status, seen.data, seen.error) == (answer.status, answer.body, None)
    assert tuple(seen.headers) == answer.headers
    assert connection.reusable == answer.reusable


@pytest.mark.parametrize("answer", ANSWERS, ids=str)
def test_an_answer_is_the_same_in_every_split(answer: Answer) -> None:
    for pieces in each_split(answer.data):
        check(answer, pieces)


@given(st.data(), st.sampled_from(ANSWERS))
def test_an_answer_is_the_same_in_many_pieces(data: st.DataObject, answer: Answer) -> None:
    places = data.draw(st.sets(st.integers(0, len(answer.data))))
    check(answer, split_at(answer.data, *places))


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
@pytest.mark.parametrize("framing", [b"content-length: 5", b"transfer-encoding: chunked"])
def test_an_answer_that_can_have_no_body_ends_with_its_head(status: bytes, framing: bytes) -> None:
    _, seen = fed([b"HTTP/1.1 " + status + b"\r\n" + framing + b"\r\n\r\n"])
    assert (seen.events, seen.error) == (["head", "end"], None)


def test_the_answer_to_head_ends_with_its_head_and_its_connection() -> None:
    for pieces in each_split(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"):
        connection, seen = fed(pieces, HEAD)
        assert (seen.events, seen.error) == (["head", "end"], None)
        assert connection.closed and not connection.reusable


@pytest.mark.parametrize("answer", [a for a in ANSWERS if not a.eof], ids=str)
@pytest.mark.parametrize("lost", [None, ConnectionResetError()], ids=["FIN", "RST"])
def test_an_answer_cut_anywhere_is_an_error(answer: Answer, lost: Exception | None) -> None:
    for length in range(len(answer.data)):
        connection, seen = fed([answer.data[:length]])
        assert "end" not in seen.events
        connection.connection_lost(lost)
        assert isinstance(seen.error, Truncated if "head" in seen.events else NoAnswer)
        assert not connection.reusable
        assert seen.error.processed


@pytest.mark.parametrize("answer", [a for a in ANSWERS if a.eof], ids=str)
def test_a_reset_is_no_proper_end(answer: Answer) -> None:
    connection, seen = fed([answer.data])
    connection.connection_lost(ConnectionResetError())
    assert isinstance(seen.error, Truncated)


@pytest.mark.parametrize(
    "noise",
    [
        b"\0\1\2\3\4\5\6\7",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"hello\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/9.9 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        GET,
    ],
)
def test_noise_is_a_bad_answer_and_ends_the_connection(noise: bytes) -> None:
    for pieces in each_split(noise):
        connection, seen = fed(pieces)
        assert isinstance(seen.error, BadAnswer)
        assert seen.events.count("end") == 1
        assert connection.closed and not connection.reusable


@given(st.binary(max_size=200), st.sets(st.integers(0, 200)))
def test_any_bytes_give_at_most_one_head_and_one_end(data: bytes, places: set[int]) -> None:
    connection, seen = fed(split_at(b"HTTP/1.1 200 OK\r\n" + data, *places))
    if not connection.closed:
        connection.connection_lost(None)
    assert seen.events.count("head") <= 1
    assert seen.events.count("end") == 1
    assert seen.events[-1] == "end"


def long_head(header_bytes: int) -> bytes:
    return b"HTTP/1.1 200 OK\r\nx: " + b"y" * header_bytes + b"\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize("piece_bytes", [1000, 1 << 20], ids=["in pieces", "at once"])
def test_a_head_over_the_limit_is_a_bad_answer(piece_bytes: int) -> None:
    data = long_head(MAX_HEAD_BYTES)
    connection, seen = fed(split_at(data, *range(0, len(data), piece_bytes)))
    assert isinstance(seen.error, BadAnswer)
    assert connection.closed
    assert "head" not in seen.events


@pytest.mark.parametrize("piece_bytes", [1000, 1 << 20], ids=["in pieces", "at once"])
def test_a_head_within_the_limit_is_none(piece_bytes: int) -> None:
    data = long_head(MAX_HEAD_BYTES - 200)
    connection, seen = fed(split_at(data, *range(0, len(data), piece_bytes)))
    assert (seen.events, seen.error, connection.reusable) == (["head", "end"], None, True)


def test_a_big_body_behind_a_small_head_is_within_the_limit() -> None:
    body = b"x" * (4 * MAX_HEAD_BYTES)
    _, seen = fed([b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body])
    assert (seen.data, seen.error) == (body, None)


def test_a_head_that_never_ends_is_stopped() -> None:
    connection, seen = fed([b"HTTP/1.1 200 OK\r\n"] + [b"x: y\r\n" * 100] * 200)
    assert isinstance(seen.error, BadAnswer)
    assert connection.closed


# --- several exchanges


def test_a_connection_carries_one_exchange_after_another() -> None:
    connection, transport = connected()
    for answer in [a for a in ANSWERS if a.reusable]:
        seen = Seen()
        connection.start(GET, b"", seen)
        connection.data_received(answer.data)
        assert (seen.status, seen.data, tuple(seen.headers)) == (
            answer.status,
            answer.body,
            answer.headers,
        )
        assert connection.reusable
    assert not transport.aborted


def test_one_exchange_at_a_time() -> None:
    connection, _ = connected()
    connection.start(GET, b"", Seen())
    with pytest.raises(RuntimeError, match="busy"):
        connection.start(GET, b"", Seen())


@pytest.mark.parametrize("lost", [None, ConnectionResetError()], ids=["FIN", "RST"])
def test_a_reused_connection_that_dies_unanswered_was_stale(lost: Exception | None) -> None:
    connection, first, second = connected()[0], Seen(), Seen()
    connection.start(GET, b"", first)
    connection.data_received(OK)
    connection.start(GET, b"", second)
    connection.connection_lost(lost)
    assert isinstance(second.error, StaleConnection)
    assert not second.error.processed
    assert first.error is None


def test_a_reused_connection_that_had_begun_to_answer_was_not_stale() -> None:
    connection, second = connected()[0], Seen()
    connection.start(GET, b"", Seen())
    connection.data_received(OK)
    connection.start(GET, b"", second)
    connection.data_received(b"H")
    connection.connection_lost(None)
    assert isinstance(second.error, NoAnswer)


def test_a_fresh_connection_is_never_stale() -> None:
    connection, seen = connected()[0], Seen()
    connection.start(GET, b"", seen)
    connection.connection_lost(None)
    assert isinstance(seen.error, NoAnswer)


@pytest.mark.parametrize("more", [b"x", OK, b"HTTP/1.1 408 Timeout\r\n\r\n"])
def test_bytes_that_nobody_asked_for_end_the_connection(more: bytes) -> None:
    connection, transport = connected()
    connection.start(GET, b"", Seen())
    connection.data_received(OK)
    connection.data_received(more)
    assert connection.closed and transport.aborted


@pytest.mark.parametrize("more", [b"x", OK, OK[:20], b"HTTP/1.1 408 Timeout\r\n\r\n"])
def test_bytes_behind_an_answer_in_one_read_end_its_connection(more: bytes) -> None:
    connection, seen = fed([OK + more])
    assert (seen.data, seen.error, seen.events.count("end")) == (b"ok", None, 1)
    assert connection.closed or not connection.reusable


# --- towards the worker


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 1 << 20])
def test_head_and_body_are_written_as_they_are(size: int) -> None:
    connection, transport = connected()
    body = b"b" * size
    connection.start(GET, body, Seen())
    assert b"".join(transport.written) == GET + body


def test_close_tells_the_sink_nothing_more() -> None:
    connection, seen = connected()[0], Seen()
    connection.start(GET, b"", seen)
    connection.data_received(OK[:-1])
    connection.close()
    connection.connection_lost(None)
    assert seen.events == ["head", "body"]
    assert connection.closed and not connection.reusable


def test_a_sink_may_close_the_connection_from_within() -> None:
    connection, _ = connected()

    class Leaves(Seen):
        def head(self, status: int, headers: Headers) -> None:
            super().head(status, headers)
            connection.close()

    seen = Leaves()
    connection.start(GET, b"", seen)
    connection.data_received(OK)
    assert seen.events == ["head"]


def test_reading_is_paused_and_resumed_unless_closed() -> None:
    connection, transport = connected()
    connection.start(GET, b"", Seen())
    connection.pause()
    assert not transport.reading
    connection.resume()
    assert transport.reading
    connection.close()
    connection.pause()
    assert transport.reading
