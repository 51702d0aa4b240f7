"""Answers that a real vLLM gave, in every split: the same events, bytes and usage.

The files are written by `python -m tests.engine.record_answers` and hold what came over the wire.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.sse import EventStream, PlainAnswer
from gateway.api.wire import Kind, kind_of
from gateway.core.request import Usage
from gateway.upstream.errors import UpstreamError
from gateway.upstream.protocol import Connection, Headers
from tests.unit.upstream.test_through import goes_through

FOLDER = Path(__file__).parent / "recorded"
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: w\r\n\r\n"


@dataclass(frozen=True)
class Recorded:
    """A file, and what it says to a reader that has all of it at hand."""

    name: str
    data: bytes
    status: int
    headers: Headers
    body: bytes

    @classmethod
    def read(cls, path: Path) -> Recorded:
        data = path.read_bytes()
        head, _, rest = data.partition(b"\r\n\r\n")
        line, *lines = head.split(b"\r\n")
        pairs = [each.split(b": ", 1) for each in lines]
        headers = [(name.lower(), value) for name, value in pairs]
        body = dechunked(rest) if (b"transfer-encoding", b"chunked") in headers else rest
        return cls(path.stem, data, int(line.split()[1]), headers, body)

    def __str__(self) -> str:
        return self.name

    @property
    def streamed(self) -> bool:
        return kind_of(self.headers) is Kind.EVENTS

    @property
    def events(self) -> list[bytes]:
        return [each + b"\n\n" for each in self.body.split(b"\n\n")[:-1]]

    @property
    def without_usage_event(self) -> bytes:
        return b"".join(each for each in self.events if b'"choices":[],' not in each)

    @property
    def usage(self) -> dict[str, Any] | None:
        """The last that the answer has."""
        payloads = [self.body]
        if self.streamed:
            payloads = [each[6:] for each in self.events if each.startswith(b"data: {")]
        found = [json.loads(each).get("usage") for each in payloads if each]
        return next((each for each in reversed(found) if each), None)


def dechunked(rest: bytes) -> bytes:
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not int(size, 16):
            return body
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]


RECORDED = [Recorded.read(path) for path in sorted(FOLDER.glob("*.http"))]
STREAMS = [each for each in RECORDED if each.streamed]
STOPPED = next(each for each in RECORDED if each.name == "stopped_stream")
WHOLE = [each for each in RECORDED if each.usage and each is not STOPPED]


class Transport:
    """Takes what is written."""

    def write(self, data: bytes) -> None:
        pass

    def abort(self) -> None:
        raise AssertionError("the connection was broken off")


@dataclass
class Reader:
    """A sink that hands every piece to the parser of its kind, as the relay does."""

    answer: EventStream | PlainAnswer
    heads: list[tuple[int, Headers]] = field(default_factory=list)
    passed: bytes = b""
    ends: list[UpstreamError | None] = field(default_factory=list)

    def head(self, status: int, headers: Headers) -> None:
        self.heads.append((status, headers))

    def body(self, data: bytes) -> None:
        assert self.heads and not self.ends
        self.passed += self.answer.feed(data)

    def end(self, error: UpstreamError | None) -> None:
        self.ends.append(error)
        self.passed += self.answer.finish()


def read(recorded: Recorded, places: list[int], withhold: bool = False) -> Reader:
    """The answer as it is read when it arrives in pieces that end at these places."""
    connection = Connection()
    connection.connection_made(cast(Any, Transport()))
    reader = Reader(EventStream(withhold) if recorded.streamed else PlainAnswer())
    connection.start(REQUEST, b"", reader)
    edges = sorted({0, len(recorded.data), *places})
    for start, end in pairwise(edges):
        assert not reader.ends, "it ended before its last byte"
        connection.data_received(recorded.data[start:end])
    assert reader.heads == [(recorded.status, recorded.headers)]
    assert reader.ends == [None]
    assert connection.reusable and not connection.closed
    return reader


def check(recorded: Recorded, places: list[int]) -> None:
    for withhold in (False, True) if recorded.streamed else (False,):
        reader = read(recorded, places, withhold)
        assert reader.passed == (recorded.without_usage_event if withhold else recorded.body)
        assert told(reader.answer.usage) == relevant(recorded.usage)
        if isinstance(reader.answer, EventStream):
            assert reader.answer.ended and reader.answer.between_events


def told(usage: Usage | None) -> tuple[int, int, int | None] | None:
    if usage is None:
        return None
    return usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens


def relevant(usage: dict[str, Any] | None) -> tuple[int, int, int | None] | None:
    if usage is None:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens")


def test_there_are_recordings_of_every_kind() -> None:
    assert {each.name for each in WHOLE} == {
        "chat", "chat_logprobs", "chat_stream", "chat_stream_two", "chat_stream_usage",
        "completion", "completion_stream",
    }  # fmt: skip
    assert {each.status for each in RECORDED} == {200, 400, 404, 500}
    for each in STREAMS:
        assert each is STOPPED or each.without_usage_event != each.body


@pytest.mark.parametrize("recorded", RECORDED, ids=str)
def test_every_cut_in_two_and_byte_by_byte(recorded: Recorded) -> None:
    for place in range(len(recorded.data)):
        check(recorded, [place])
    check(recorded, list(range(len(recorded.data))))


@given(st.data(), st.sampled_from(RECORDED))
def test_any_split(data: st.DataObject, recorded: Recorded) -> None:
    check(recorded, data.draw(st.lists(st.integers(0, len(recorded.data)), max_size=40)))


@pytest.mark.parametrize("recorded", WHOLE, ids=str)
def test_an_answer_that_came_to_its_end_is_complete(recorded: Recorded) -> None:
    for place in range(0, len(recorded.data), 7):
        assert read(recorded, [place]).answer.complete


@pytest.mark.parametrize("recorded", [each for each in STREAMS if each is not STOPPED], ids=str)
def test_c04_an_aborted_stream_is_not_complete(recorded: Recorded) -> None:
    """vLLM that is stopped may end a stream properly, with a finish reason that says so."""
    body = recorded.body.replace(b'"finish_reason":"length"', b'"finish_reason":"abort"')
    for withhold in (False, True):
        stream = EventStream(withhold)
        for byte in body:
            stream.feed(bytes([byte]))
        assert stream.ended and not stream.complete


def test_c04_a_stream_that_the_engines_death_ended_is_not_complete() -> None:
    """vLLM writes an event with its error, then [DONE] and the proper last chunk."""
    assert STOPPED.events[-2].startswith(b'data: {"error": {')
    for place in range(len(STOPPED.data)):
        assert not read(STOPPED, [place]).answer.complete


# --- chunks that the relay lets through as they came

WITHOUT_USAGE_EVENTS = {
    each.name: each.without_usage_event.replace(b',"usage":', b',"other":') for each in STREAMS
}
ABORTED = {
    each.name: each.body.replace(b'"finish_reason":"length"', b'"finish_reason":"abort"')
    for each in STREAMS
}
BODIES = [
    *(pytest.param(each.body, id=each.name) for each in STREAMS),
    *(pytest.param(body, id=f"{name}-no-usage") for name, body in WITHOUT_USAGE_EVENTS.items()),
    *(pytest.param(body, id=f"{name}-aborted") for name, body in ABORTED.items()),
]


def outcome(stream: EventStream) -> tuple[Any, ...]:
    return told(stream.usage), stream.ended, stream.complete


def check_chunks(body: bytes, places: list[int]) -> None:
    """The worker's chunks end at these places, and each comes in a read of its own."""
    for withhold in (False, True):
        whole, stream = EventStream(withhold), EventStream(withhold)
        passed = whole.feed(body) + whole.finish()
        edges = sorted({0, len(body), *places})
        got = b""
        for start, end in pairwise(edges):
            chunk = body[start:end]
            framed = b"%x\r\n%b\r\n" % (len(chunk), chunk)
            got += chunk if goes_through(stream, framed) else stream.feed(chunk)
        got += stream.finish()
        assert got == passed
        assert outcome(stream) == outcome(whole)


@pytest.mark.parametrize("body", BODIES)
def test_chunks_let_through_change_no_bytes_and_no_count(body: bytes) -> None:
    events = [m + 2 for m in range(len(body)) if body.startswith(b"\n\n", m)]
    check_chunks(body, events)  # as vLLM writes them
    for skipped in range(len(events)):  # two events in one chunk
        check_chunks(body, events[:skipped] + events[skipped + 1 :])
    for event in events:
        check_chunks(body, [event])
        for back in range(1, 150, 7):  # an event cut by a chunk's end
            check_chunks(body, [*events, event - back])
            check_chunks(body, [event - back])
    for size in (64, 100, 300, 1000):
        check_chunks(body, list(range(0, len(body), size)))


@given(st.data(), st.sampled_from([param.values[0] for param in BODIES]))
def test_any_chunks_let_through(data: st.DataObject, body: bytes) -> None:
    check_chunks(body, data.draw(st.lists(st.integers(0, len(body)), max_size=12)))
