from __future__ import annotations

import json
from collections.abc import Sequence

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.wire import (
    HOP_BY_HOP,
    Kind,
    find_usage,
    kind_of,
    parse_call,
    parse_usage,
    to_client,
    to_worker,
)
from gateway.core.request import Usage
from tests.unit.api.recorded import PLAIN, USAGE, USAGE_JSON

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)

# --- what routing must know of a body


def test_a_call_is_read() -> None:
    call = parse_call(
        b'{"model":"m","stream":true,"stream_options":{"include_usage":true},'
        b'"max_tokens":7,"max_completion_tokens":5,"messages":[]}'
    )
    assert call.parsed
    assert (call.model, call.stream, call.wants_usage, call.max_tokens) == ("m", True, True, 5)
    assert call.fields["messages"] == []


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 0, "max_tokens": 7}, 0),
        ({"max_completion_tokens": None, "max_tokens": 7}, 7),
        ({"max_completion_tokens": "5", "max_tokens": 7}, 7),
        ({"max_tokens": -1}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": 1.5}, None),
        ({}, None),
    ],
)
def test_the_limit_of_an_answer(body: object, limit: int | None) -> None:
    assert parse_call(orjson.dumps(body)).max_tokens == limit


@pytest.mark.parametrize("stream", [1, "true", None, [True]])
def test_only_true_is_a_stream(stream: object) -> None:
    assert not parse_call(orjson.dumps({"stream": stream})).stream


@pytest.mark.parametrize(
    "options", [None, True, [], "x", {}, {"include_usage": False}, {"include_usage": None}]
)
def test_usage_is_not_wanted_by_who_does_not_say_so(options: object) -> None:
    assert not parse_call(orjson.dumps({"stream_options": options})).wants_usage


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"1", b'"text"', b"null", b'{"a":NaN}', b"\xff\xfe", b"{}x", b"[" * 5000],
)
def test_what_is_no_json_object_is_unparsed_and_no_error(body: bytes) -> None:
    call = parse_call(body)
    assert (call.parsed, call.fields, call.model, call.stream) == (False, {}, None, False)


FIELDS = ("model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "prompt")


@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_fields_of_any_type_are_no_error(fields: dict[str, object]) -> None:
    call = parse_call(json.dumps(fields).encode())
    assert call.model is None or isinstance(call.model, str)
    assert call.max_tokens is None or call.max_tokens >= 0


@given(st.binary(max_size=60))
def test_bytes_of_any_kind_are_no_error(body: bytes) -> None:
    parse_call(body)


# --- usage


def test_usage_is_read_from_the_end_of_an_answer() -> None:
    assert find_usage(PLAIN) == USAGE
    assert find_usage(PLAIN[-400:]) == USAGE


@given(st.text(), st.text())
def test_no_text_passes_for_usage(before: str, after: str) -> None:
    imitation = '"usage":{"prompt_tokens":1,"completion_tokens":1}'
    said = json.dumps({"content": f"{before}{imitation}{after}"}, separators=(",", ":"))
    assert find_usage(said.encode()) is None
    answer = said[:-1] + ',"usage":{"prompt_tokens":5,"completion_tokens":3}}'
    assert find_usage(answer.encode()) == Usage(5, 3, None)


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        ('"usage":null}', None),
        ('"usage":', None),
        ('"usage":"x"', None),
        ('"usage":{"prompt_tokens":"5","completion_tokens":3}', None),
        ('"usage":{"completion_tokens":3}', None),
        ('"usage":{"prompt_tokens":-5}', None),
        ('"usage":{"prompt_tokens":5,}', None),
        ('"usage":{}', None),
        ('"usage": {"prompt_tokens": 5} }', Usage(5, 0, None)),
        ('"usage":{"prompt_tokens":5,"completion_tokens":3,"x":null}', Usage(5, 3, None)),
        ('"usage":{"prompt_tokens":5,"prompt_tokens_details":null}', Usage(5, 0, None)),
        ('"usage":{"prompt_tokens":5,"prompt_tokens_details":{}}', Usage(5, 0, None)),
        (
            '"usage":{"prompt_tokens_details":{"cached_tokens":4},"prompt_tokens":5,'
            '"completion_tokens_details":{"reasoning_tokens":0}},"more":{}}',
            Usage(5, 0, 4),
        ),
        ('"usage":{"prompt_tokens":5},"usage":{"prompt_tokens":6}', Usage(6, 0, None)),
    ],
)
def test_usage_of_many_shapes(tail: str, usage: Usage | None) -> None:
    assert find_usage(f'{{"choices":[],{tail}'.encode()) == usage


@pytest.mark.timeout(10)
def test_usage_that_was_cut_is_none_and_takes_no_time() -> None:
    for length in range(len(USAGE_JSON)):
        assert find_usage(b'"usage":' + USAGE_JSON[:length].encode()) is None


@pytest.mark.timeout(10)
@pytest.mark.parametrize("filler", [b"1", b"{", b"}", b"{}", b"{1", b'"x":{},', b" "])
def test_no_usage_takes_long_to_read(filler: bytes) -> None:
    find_usage(b'"usage":{' + filler * 4096)


@given(JSON)
def test_usage_of_any_type_is_no_error(usage: object) -> None:
    parse_usage(usage)


# --- headers


def passed_on(
    headers: list[tuple[bytes, bytes]], ours: Sequence[tuple[bytes, bytes]] = ()
) -> list[tuple[bytes, bytes]]:
    return to_client(headers, kind_of(headers), ours)


def test_hop_by_hop_headers_end_here_in_both_directions() -> None:
    hop = [(name, b"x") for name in HOP_BY_HOP]
    assert to_worker([*hop, (b"a", b"1")], b"id") == ((b"a", b"1"), (b"x-request-id", b"id"))
    assert passed_on([*hop, (b"a", b"1")], [(b"ours", b"2")]) == [(b"a", b"1"), (b"ours", b"2")]


@pytest.mark.parametrize("value", [b"x-mine", b"close, X-Mine", b"X-MINE ,keep-alive", b",x-mine,"])
def test_what_a_connection_header_names_ends_here(value: bytes) -> None:
    headers = [(b"connection", value), (b"x-mine", b"1"), (b"x-other", b"2")]
    assert to_worker(headers, b"id")[:-1] == ((b"x-other", b"2"),)
    assert passed_on(headers) == [(b"x-other", b"2")]


def test_several_connection_headers_are_one() -> None:
    headers = [(b"connection", b"a"), (b"a", b"1"), (b"b", b"2"), (b"connection", b"b")]
    assert passed_on(headers) == []


def test_what_the_worker_gets_of_the_client_s_headers() -> None:
    kept = ((b"authorization", b"Bearer k"), (b"accept", b"*/*"), (b"accept", b"a/b"))
    ours = [
        (b"host", b"gateway"),
        (b"content-length", b"5"),
        (b"expect", b"100-continue"),
        (b"x-request-id", b"theirs"),
    ]
    assert to_worker([*kept, *ours], b"mine") == (*kept, (b"x-request-id", b"mine"))


def test_what_the_client_gets_of_the_worker_s_headers() -> None:
    worker = [
        (b"content-type", b"application/json"),
        (b"set-cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
        (b"x-request-id", b"theirs"),
        (b"x-gateway-worker", b"9"),
        (b"x-gateway-predicted-cached-tokens", b"9"),
        (b"content-length", b"2"),
    ]
    ours = [(b"x-request-id", b"mine"), (b"x-gateway-worker", b"0")]
    assert passed_on(worker, ours) == [*worker[:3], worker[-1], *ours]


def test_an_event_stream_is_not_to_be_kept_by_proxies() -> None:
    worker = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"max-age=60"),
        (b"x-accel-buffering", b"yes"),
    ]
    assert passed_on(worker) == [
        worker[0],
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]
    plain = [(b"content-type", b"application/json"), (b"cache-control", b"max-age=60")]
    assert passed_on(plain) == plain


def test_an_event_stream_s_length_is_not_promised() -> None:
    worker = [(b"content-type", b"text/event-stream"), (b"content-length", b"2000")]
    assert b"content-length" not in dict(passed_on(worker))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (b"text/event-stream", Kind.EVENTS),
        (b"text/event-stream; charset=utf-8", Kind.EVENTS),
        (b"application/json", Kind.PLAIN),
        (b"text/plain", Kind.PLAIN),
    ],
)
def test_which_answers_are_event_streams(value: bytes, kind: Kind) -> None:
    assert kind_of([(b"x", b"y"), (b"content-type", value)]) is kind
    assert kind_of([(b"accept", value)]) is Kind.PLAIN


def test_which_event_streams_are_encoded() -> None:
    events = (b"content-type", b"text/event-stream")
    assert kind_of([(b"content-encoding", b"gzip"), events]) is Kind.ENCODED_EVENTS
    assert kind_of([events, (b"content-encoding", b"Identity")]) is Kind.EVENTS
    assert kind_of([events, (b"x-type", b"gzip")]) is Kind.EVENTS
    assert kind_of([(b"content-encoding", b"gzip")]) is Kind.PLAIN
