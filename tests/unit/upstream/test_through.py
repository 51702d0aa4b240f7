"""Whole chunks that go through as they came: the client's bytes are the same as by the parser."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.api.sse import EventStream
from gateway.api.through import let_through
from gateway.upstream.protocol import Connection, Headers
from tests.unit.api.recorded import STREAM, WITHOUT_USAGE
from tests.unit.upstream.test_protocol import Seen, connected

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [event + b"\n\n" for event in STREAM.split(b"\n\n")[:-1]]


class Written(asyncio.WriteTransport):
    """What is written to it, while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closing
        self.data += data

    def is_closing(self) -> bool:
        return self.closing


class Parsing(Connection):
    """A connection at the beginning of a chunk that notes what is left to its parser."""

    def __init__(self) -> None:
        super().__init__()
        self.at_chunk = True
        self.parsed: list[bytes] = []

    def parse(self, data: bytes) -> None:
        self.parsed.append(data)


def goes_through(stream: EventStream, framed: bytes) -> bool:
    """Whether the client gets these bytes past the parser; one of both does, as they are."""
    connection, written = Parsing(), Written()
    let_through(stream, connection, written)(framed)
    assert [framed] == [*connection.parsed, *([written.data] if written.data else [])]
    assert connection.heard == bool(written.data)
    return bool(written.data)


class Client:
    """Writes to one client as the relay does, and takes the chunks apart as a client does."""

    def __init__(self, connection: Connection, withhold: bool) -> None:
        self.answer = EventStream(withhold)
        self.written = Written()
        self.through_count = 0
        self.ended = False
        self._connection = connection

    def head(self, status: int, headers: Headers) -> None:
        self._connection.deliver = self.forward
        self._connection.intercept(let_through(self.answer, self._connection, self.written))

    def body(self, data: bytes) -> None:
        self.forward(data)

    def end(self, error: Exception | None) -> None:
        assert error is None
        self.ended = True

    def forward(self, data: bytes) -> None:
        self.through_count += len(self.answer.framed)
        if passed := self.answer.feed(data):
            self.written.write(b"%x\r\n%b\r\n" % (len(passed), passed))

    def bytes_passed(self) -> bytes:
        rest = self.written.data + (
            b"%x\r\n%b\r\n" % (len(held), held) if (held := self.answer.finish()) else b""
        )
        passed = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            assert rest[length : length + 2] == b"\r\n"
            passed, rest = passed + rest[:length], rest[length + 2 :]
        return passed


def wire(payloads: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in payloads if p) + b"0\r\n\r\n"


def relayed(reads: list[bytes], withhold: bool) -> Client:
    connection, _ = connected()
    client = Client(connection, withhold)
    connection.start(b"POST / HTTP/1.1\r\n\r\n", b"", client)
    connection.data_received(HEAD)
    for read in reads:
        connection.data_received(read)
    assert client.ended and connection.reusable
    return client


def cut(data: bytes, places: set[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % len(data) for place in places)})
    return [data[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize("withhold", [True, False])
def test_an_event_a_chunk_and_a_chunk_a_read_goes_through(withhold: bool) -> None:
    reads = [b"%x\r\n%b\r\n" % (len(e), e) for e in EVENTS]
    client = relayed([*reads, b"0\r\n\r\n"], withhold)
    assert client.bytes_passed() == (WITHOUT_USAGE if withhold else STREAM)
    assert client.through_count >= len(EVENTS) - 3, "all but usage and the end"
    assert client.answer.complete and client.answer.usage is not None


@settings(max_examples=500)
@example(set(), set(range(0, 4000, 7)), True)
@given(
    st.sets(st.integers(0, 4000), max_size=12),
    st.sets(st.integers(0, 6000), max_size=40),
    st.booleans(),
)
def test_any_chunks_in_any_reads_give_the_same_bytes(
    chunks: set[int], reads: set[int], withhold: bool
) -> None:
    data = wire(cut(STREAM, chunks) if chunks else EVENTS)
    client = relayed(cut(data, reads), withhold)
    assert client.bytes_passed() == (WITHOUT_USAGE if withhold else STREAM)
    assert client.answer.complete
    assert client.answer.usage == relayed([wire([STREAM])], withhold).answer.usage


def test_an_aborted_stream_that_went_through_is_not_complete() -> None:
    aborted = [e.replace(b'"finish_reason":"stop"', b'"finish_reason":"abort"') for e in EVENTS]
    assert aborted != EVENTS
    client = relayed([*(b"%x\r\n%b\r\n" % (len(e), e) for e in aborted), b"0\r\n\r\n"], True)
    assert (client.answer.ended, client.answer.complete) == (True, False)


@pytest.mark.parametrize(
    "framed",
    [
        b"",
        b"zz\r\n" + b"x" * 80 + b"\n\n\r\n",
        b"50;ext=1\r\n" + b"x" * 78 + b"\n\n\r\n",
        b"4f\r\n" + b"x" * 78 + b"\n\n\r\n",
        b"52\r\n" + b"x" * 78 + b"\n\n\r\n",
        b"50\r\n" + b"x" * 78 + b"\n\n\r\n0\r\n\r\n",
        b'50\r\ndata: {"choices":[],' + b"x" * 57 + b"\n\n\r\n",
    ],
)
def test_what_is_no_whole_ordinary_chunk_does_not(framed: bytes) -> None:
    assert not goes_through(EventStream(True), framed)


ORDINARY = b"50\r\n" + b"x" * 78 + b"\n\n\r\n"


def test_what_is_one_does_unless_an_event_is_half_sent() -> None:
    assert goes_through(EventStream(True), ORDINARY)
    stream = EventStream(True)
    stream.feed(b'data: {"choices":[{')
    assert not goes_through(stream, ORDINARY)
    stream.feed(b"}]}\n\n")
    assert goes_through(stream, ORDINARY)


def test_what_is_one_does_not_within_another() -> None:
    connection, written = Parsing(), Written()
    connection.at_chunk = False
    let_through(EventStream(True), connection, written)(ORDINARY)
    assert (connection.parsed, written.data) == ([ORDINARY], b"")


@pytest.mark.parametrize("size", [64, 255, 256, 2000])
def test_chunks_of_usual_sizes_go_through(size: int) -> None:
    assert goes_through(EventStream(True), b"%x\r\n%b\n\n\r\n" % (size, b"x" * (size - 2)))


def test_nothing_is_written_to_a_client_that_leaves() -> None:
    connection, written = Parsing(), Written()
    written.closing = True
    let_through(EventStream(True), connection, written)(ORDINARY)
    assert not connection.parsed


def test_the_next_answer_is_not_intercepted() -> None:
    connection, _ = connected()
    client = Client(connection, True)
    connection.start(b"POST / HTTP/1.1\r\n\r\n", b"", client)
    for read in (HEAD, ORDINARY, b"0\r\n\r\n"):
        connection.data_received(read)
    assert client.ended and client.written.data == ORDINARY
    seen = Seen()
    connection.start(b"POST / HTTP/1.1\r\n\r\n", b"", seen)
    for read in (HEAD, ORDINARY, b"0\r\n\r\n"):
        connection.data_received(read)
    assert client.written.data == ORDINARY and seen.data == ORDINARY[4:-2]


def test_long_streams_keep_their_last_bytes_only() -> None:
    stream = EventStream(True)
    for _ in range(10_000):
        goes_through(stream, ORDINARY)
    assert stream.usage is None and not stream.ended
    stream.feed(b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":9}}\n\n')
    stream.feed(b"data: [DONE]\n\n")
    assert stream.complete and stream.usage is not None
    assert stream.usage.completion_tokens == 9
