"""When a stream has ended, and when it is whole, by endpoint."""

from __future__ import annotations

import pytest

from gateway.api.dialect import CHAT, DIALECTS, MESSAGES, RESPONSES, Dialect, of_path
from gateway.api.sse import EventStream, PlainAnswer

STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
DELTA = (
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn",'
    b'"stop_sequence":null},"usage":{"input_tokens":2,"output_tokens":4,'
    b'"cache_creation_input_tokens":16,"cache_read_input_tokens":32}}\n\n'
)
COMPLETED = (
    b'event: response.completed\ndata: {"response":{"output":["%b"],"status":"completed",'
    b'"usage":{"input_tokens":50,"input_tokens_details":{"cached_tokens":32,"per_turn":[]},'
    b'"output_tokens":4,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":54},'
    b'"user":null},"sequence_number":9,"type":"response.completed"}\n\n'
) % (b"x" * 10_000)


def fed(dialect: Dialect, data: bytes, size: int) -> EventStream:
    stream = EventStream(False, dialect)
    passed = b"".join(stream.feed(data[at : at + size]) for at in range(0, len(data), size))
    assert passed + stream.finish() == data
    return stream


@pytest.mark.parametrize("size", [1, 7, 4096, 1 << 20])
@pytest.mark.parametrize(("dialect", "data"), [(MESSAGES, DELTA + STOP), (RESPONSES, COMPLETED)])
def test_a_whole_stream_is_whole_and_has_its_usage(
    dialect: Dialect, data: bytes, size: int
) -> None:
    stream = fed(dialect, data, size)
    assert stream.ended and stream.complete and stream.between_events
    usage = stream.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (50, 4, 32)


@pytest.mark.parametrize(("dialect", "data"), [(MESSAGES, DELTA + STOP), (RESPONSES, COMPLETED)])
def test_a_part_of_it_is_not(dialect: Dialect, data: bytes) -> None:
    for end in [*range(1, 60), *range(len(data) - 60, len(data))]:
        assert not fed(dialect, data[:end], 1 << 20).ended


@pytest.mark.parametrize(
    ("dialect", "data", "ended"),
    [
        (MESSAGES, DELTA.replace(b'"end_turn"', b"null") + STOP, True),
        (MESSAGES, b'event: error\ndata: {"type":"error","error":{"type":"x"}}\n\n', True),
        (MESSAGES, DELTA + b"data: [DONE]\n\n", False),
        (RESPONSES, COMPLETED.replace(b'"completed"', b'"cancelled"', 1), True),
        (RESPONSES, COMPLETED.replace(b"response.completed", b"response.failed"), True),
        (RESPONSES, COMPLETED.replace(b"response.completed", b"response.in_progress"), False),
        (CHAT, STOP, False),
    ],
)
def test_what_is_not_whole(dialect: Dialect, data: bytes, ended: bool) -> None:
    if b"response.failed" in data:
        data = data.replace(b'"status":"completed"', b'"status":"failed"')
    stream = fed(dialect, data, 1000)
    assert stream.ended == ended
    assert not stream.complete


def test_text_that_looks_like_an_end_is_none() -> None:
    said = b'data: {"delta":{"text":"{\\"type\\":\\"message_stop\\"}"}}\n\n'
    assert not fed(MESSAGES, said, 5).ended
    said = b'data: {"delta":"\\"type\\":\\"response.completed\\"}"}\n\n'
    assert not fed(RESPONSES, said, 5).ended


@pytest.mark.parametrize(
    ("dialect", "data", "whole"),
    [
        (RESPONSES, b'{"status":"completed"}', True),
        (RESPONSES, b'{"status":"incomplete"}', True),
        (RESPONSES, b'{"status":"cancelled"}', False),
        (MESSAGES, b'{"stop_reason":"end_turn"}', True),
        (MESSAGES, b'{"stop_reason":null}', False),
    ],
)
def test_a_plain_answer_may_have_been_stopped(dialect: Dialect, data: bytes, whole: bool) -> None:
    for size in (1, 100):
        answer = PlainAnswer(dialect)
        for at in range(0, len(data), size):
            answer.feed(data[at : at + size])
        assert answer.complete == whole


def test_a_path_has_the_errors_of_its_api() -> None:
    for path, dialect in DIALECTS.items():
        assert of_path(path) is dialect
    assert of_path("/nowhere") is CHAT
