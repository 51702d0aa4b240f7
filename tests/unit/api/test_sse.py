from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.sse import EventStream, PlainAnswer
from tests.unit.api.recorded import (
    CONTENT,
    DONE,
    PLAIN,
    STREAM,
    USAGE,
    USAGE_EVENT,
    USAGE_JSON,
    WITHOUT_USAGE,
    chunk,
)

CRLF = STREAM.replace(b"\n\n", b"\r\n\r\n")
SPACED = STREAM.replace(b'"choices":', b'"choices": ').replace(b'"usage":', b'"usage": ')


def split_at(data: bytes, *places: int) -> list[bytes]:
    edges = sorted({0, len(data), *places})
    return [data[a:b] for a, b in pairwise(edges)]


def each_split(data: bytes) -> list[list[bytes]]:
    """Every way to cut it in two, and each byte alone."""
    return [split_at(data, at) for at in range(len(data))] + [split_at(data, *range(len(data)))]


def feed(answer: EventStream | PlainAnswer, pieces: list[bytes]) -> bytes:
    return b"".join([*map(answer.feed, pieces), answer.finish()])


def must_have_passed(arrived: bytes) -> bytes:
    """What a client must have of these bytes at once: all whole events but those of usage, and of
    the last, broken one what there is if it can be no usage event any more."""
    *whole, rest = arrived.split(b"\n\n")
    events = [event + b"\n\n" for event in whole]
    told = b'"choices":[{' in rest or not rest.startswith(b"data:"[: len(rest)])
    return b"".join([*(e for e in events if e != USAGE_EVENT), rest if told else b""])


# --- bytes and timing, however they are split


def test_every_split_passes_the_same_bytes_but_the_usage_nobody_asked_for() -> None:
    for pieces in each_split(STREAM):
        assert feed(EventStream(True), pieces) == WITHOUT_USAGE
        assert feed(EventStream(False), pieces) == STREAM


@given(st.sets(st.integers(0, len(STREAM))))
def test_what_can_be_told_passes_at_once(places: set[int]) -> None:
    stream = EventStream(True)
    arrived = passed = b""
    for piece in split_at(STREAM, *places):
        arrived += piece
        passed += stream.feed(piece)
        assert passed == must_have_passed(arrived)


@given(st.sets(st.integers(0, len(STREAM))))
def test_who_asked_for_usage_gets_every_piece_as_it_came(places: set[int]) -> None:
    stream = EventStream(False)
    for piece in split_at(STREAM, *places):
        assert stream.feed(piece) == piece


def test_part_of_an_event_with_a_choice_passes_at_once() -> None:
    stream = EventStream(True)
    event = CONTENT[1]
    shown = event.index(b'"choices":[{') + len(b'"choices":[{')
    assert stream.feed(event[: shown - 1]) == b""
    assert stream.feed(event[shown - 1 : shown]) == event[:shown]
    assert stream.feed(event[shown : shown + 5]) == event[shown : shown + 5]
    assert stream.feed(event[shown + 5 :]) == event[shown + 5 :]
    assert stream.feed(USAGE_EVENT + DONE) == DONE


def test_every_split_of_crlf_passes_untouched() -> None:
    for pieces in each_split(CRLF):
        assert feed(EventStream(True), pieces) == CRLF


def test_crlf_events_with_a_choice_pass_at_once() -> None:
    stream = EventStream(True)
    for event in CONTENT:
        assert stream.feed(event.replace(b"\n\n", b"\r\n\r\n")) == event.replace(
            b"\n\n", b"\r\n\r\n"
        )


def test_a_writer_with_spaces_is_understood_too() -> None:
    for pieces in each_split(SPACED):
        stream = EventStream(True)
        assert b'"choices": []' not in feed(stream, pieces)
        assert stream.usage == USAGE


OTHERS = [
    pytest.param(b": ping\n\n" + STREAM, b": ping\n\n" + WITHOUT_USAGE, id="comment"),
    pytest.param(b"event: x\ndata: {}\n\n" + DONE, None, id="named event"),
    pytest.param(b"data: {}\n\ndata: not JSON\n\n" + DONE, None, id="other data"),
    pytest.param(b'data: {"error":{"message":"m"}}\n\n' + DONE, None, id="error"),
    pytest.param(chunk("[]") + DONE, None, id="no choices and no usage"),
    pytest.param(chunk("[]", ',"usage":null') + DONE, None, id="usage of nothing"),
    pytest.param(b'data: {"x":{"choices":[]},"usage":{}}\n\n' + DONE, None, id="choices deeper"),
    pytest.param(b"data:" + USAGE_EVENT[6:] + DONE, DONE, id="no space after the colon"),
    pytest.param(USAGE_EVENT * 3 + DONE, DONE, id="several usage events"),
    pytest.param(b"\n\n\n" + STREAM, b"\n\n\n" + WITHOUT_USAGE, id="empty lines"),
    pytest.param(CONTENT[0][:-2], None, id="cut in an event"),
    pytest.param(USAGE_EVENT[:-30], None, id="cut in the usage event"),
    pytest.param(USAGE_EVENT[:-1], None, id="cut before its last byte"),
    pytest.param(b"\0\xff\xfe" * 50, None, id="no text at all"),
]


@pytest.mark.parametrize(("data", "expected"), OTHERS)
def test_other_streams_pass_in_every_split(data: bytes, expected: bytes | None) -> None:
    for pieces in each_split(data):
        assert feed(EventStream(True), pieces) == (data if expected is None else expected)


@pytest.mark.parametrize("withhold", [True, False])
def test_it_is_known_whether_the_client_is_between_two_events(withhold: bool) -> None:
    for pieces in each_split(STREAM):
        stream = EventStream(withhold)
        passed = b""
        assert stream.between_events
        for piece in pieces:
            passed += stream.feed(piece)
            assert stream.between_events == (not passed or passed.endswith(b"\n\n"))


def test_an_endless_event_is_held_within_bounds() -> None:
    stream = EventStream(True)
    passed = stream.feed(b"data: ")
    passed += b"".join(stream.feed(b"x" * 1000) for _ in range(80))
    assert len(passed) >= 64 * 1000
    assert passed + stream.finish() == b"data: " + b"x" * 80_000


@given(st.lists(st.sampled_from([*CONTENT, USAGE_EVENT, DONE, b"\n\n", b"data: ", b"{}", b"\n"])))
def test_any_stream_is_the_same_whole_and_byte_by_byte(parts: list[bytes]) -> None:
    data = b"".join(parts)
    single = [data[i : i + 1] for i in range(len(data))]
    assert feed(EventStream(True), single) == feed(EventStream(True), [data] if data else [])


# --- what is read on the way


def test_usage_and_the_end_are_seen_in_every_split() -> None:
    for data in (STREAM, CRLF):
        for pieces in each_split(data):
            for withhold in (True, False):
                stream = EventStream(withhold)
                feed(stream, pieces)
                assert (stream.usage, stream.ended, stream.complete) == (USAGE, True, True)


@given(st.sets(st.integers(0, len(STREAM))), st.integers(0, len(STREAM) - len(DONE)))
def test_a_stream_that_was_cut_has_not_ended(places: set[int], length: int) -> None:
    stream = EventStream(True)
    for piece in split_at(STREAM[:length], *(place for place in places if place < length)):
        stream.feed(piece)
    assert not stream.ended
    assert not stream.complete


def test_the_words_of_the_end_in_the_text_are_not_the_end() -> None:
    said = chunk('[{"index":0,"delta":{"content":"write data: [DONE] last"}}]')
    for pieces in each_split(said):
        stream = EventStream(True)
        feed(stream, pieces)
        assert not stream.ended
        assert not stream.complete


def test_an_aborted_stream_is_ended_but_not_complete() -> None:
    data = STREAM.replace(b'"finish_reason":"stop"', b'"finish_reason":"abort"')
    for pieces in each_split(data):
        stream = EventStream(True)
        feed(stream, pieces)
        assert (stream.ended, stream.complete) == (True, False)


def test_without_usage_there_is_none() -> None:
    stream = EventStream(True)
    feed(stream, [CONTENT[1], DONE])
    assert stream.usage is None
    assert EventStream(True).usage is None


def test_usage_behind_a_long_answer_is_found() -> None:
    stream = EventStream(True)
    feed(stream, CONTENT[1:3] * 2000 + [USAGE_EVENT, DONE])
    assert stream.usage == USAGE


# --- answers in one body


def test_every_split_of_a_plain_answer_is_read_alike() -> None:
    for pieces in each_split(PLAIN):
        answer = PlainAnswer()
        assert feed(answer, pieces) == PLAIN
        assert (answer.usage, answer.complete) == (USAGE, True)


def test_every_split_of_an_aborted_plain_answer_is_incomplete() -> None:
    aborted = PLAIN.replace(b'"finish_reason":"stop"', b'"finish_reason":"abort"')
    for pieces in each_split(aborted):
        answer = PlainAnswer()
        feed(answer, pieces)
        assert not answer.complete


@pytest.mark.timeout(10)
@pytest.mark.parametrize("body", [b"", b"{}", b"not JSON", PLAIN[:-120]])
def test_a_plain_answer_without_usage(body: bytes) -> None:
    answer = PlainAnswer()
    feed(answer, [body])
    assert answer.usage is None


def test_the_usage_behind_a_huge_answer_is_found() -> None:
    answer = PlainAnswer()
    piece = b"x" * (1 << 20)
    for _ in range(9):
        assert answer.feed(piece) is piece
    assert answer.usage is None
    answer.feed(f'"usage":{USAGE_JSON}}}'.encode())
    assert answer.usage == USAGE
