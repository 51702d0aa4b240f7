"""OpenAI's request and answer formats, as far as routing must know them. No I/O.

Parsing is lenient: a field of an unexpected type is treated as absent, the worker judges the
request. The body itself is kept and forwarded byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import orjson

from gateway.core.request import Usage

HOP_BY_HOP = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
        b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
    )
)  # fmt: skip
DEBUG = b"x-gateway-debug"
"""A request with it gets its placement's terms in a header of the answer."""

_OURS_TO_WORKER = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id", DEBUG}
_OURS_TO_CLIENT = HOP_BY_HOP | {
    b"x-request-id", b"x-gateway-worker", b"x-gateway-predicted-cached-tokens",
    b"x-gateway-placement",
}  # fmt: skip

_AS_IT_IS_MADE = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
_HINTS = {name for name, _ in _AS_IT_IS_MADE}

Headers = Sequence[tuple[bytes, bytes]]

_USAGE_OBJECT = re.compile(rb"\s*\{(?:[^{}]++|\{[^{}]*+\})*+\}")
_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed request body: ``fields`` is empty where it was not a JSON object."""

    fields: dict[str, Any]
    parsed: bool
    model: str | None = None
    stream: bool = False
    wants_usage: bool = False
    max_tokens: int | None = None


def parse_call(body: bytes) -> Call:
    """What routing must know of a body; ``parsed`` is False where orjson refuses it."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return Call({}, parsed=False)
    if not isinstance(fields, dict):
        return Call({}, parsed=False)
    model = fields.get("model")
    options = fields.get("stream_options")
    limits = (fields.get(name) for name in _LIMITS)
    return Call(
        fields,
        parsed=True,
        model=model if isinstance(model, str) else None,
        stream=fields.get("stream") is True,
        wants_usage=isinstance(options, dict) and options.get("include_usage") is True,
        max_tokens=next((count for limit in limits if (count := _count(limit)) is not None), None),
    )


_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def _count(value: object) -> int | None:
    counted = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if counted else None  # type: ignore[return-value]


def parse_usage(usage: object) -> Usage | None:
    """Counts from a ``usage`` object; None if it is not one."""
    if not isinstance(usage, dict):
        return None
    if "input_tokens" in usage:
        return _input_usage(usage)
    prompt, completion = (
        _count(usage.get("prompt_tokens")),
        _count(usage.get("completion_tokens", 0)),
    )
    if prompt is None or completion is None:
        return None
    details = usage.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    return Usage(prompt, completion, cached)


def _input_usage(usage: dict[str, Any]) -> Usage | None:
    """Of a response, or of Anthropic's messages: these leave cached tokens out of the input."""
    given, completion = _count(usage["input_tokens"]), _count(usage.get("output_tokens", 0))
    if given is None or completion is None:
        return None
    details = usage.get("input_tokens_details")
    if isinstance(details, dict):
        return Usage(given, completion, _count(details.get("cached_tokens")))
    cached = _count(usage.get("cache_read_input_tokens"))
    made = _count(usage.get("cache_creation_input_tokens"))
    return Usage(given + (cached or 0) + (made or 0), completion, cached)


def find_usage(tail: bytes) -> Usage | None:
    """Usage from the last bytes of a JSON answer.

    The key is looked for from the end: inside a JSON string its quotes would be escaped, so the
    pattern can only be a key, and vLLM writes it after the choices.
    """
    at = tail.rfind(b'"usage":')
    if at < 0:
        return None
    return parse_usage(_value_at(tail, at + len(b'"usage":')))


def _value_at(data: bytes, start: int) -> object:
    """The JSON object that starts at ``start``; None if there is none.

    A usage object holds numbers and objects of numbers, so its braces tell where it ends.
    """
    found = _USAGE_OBJECT.match(data, start, start + 4096)
    if found is None:
        return None
    try:
        return orjson.loads(found[0])
    except orjson.JSONDecodeError:
        return None


def request_id(headers: Headers, fresh: bytes) -> bytes:
    """The client's request id if it is sane, else ``fresh``."""
    for name, value in headers:
        if name == b"x-request-id" and _SANE_ID.fullmatch(value):
            return value
    return fresh


_SESSION_HEADERS = (b"x-claude-code-session-id", b"x-session-id")
_SESSION_FIELDS = ("prompt_cache_key", "user")
_SESSION_CHARS = 256


class Hints(NamedTuple):
    """What a client tells of its request beside the body: whether it wants to know its placement's
    terms, and the name of its session."""

    debug: bool
    session: str | None


def hints(headers: Headers, fields: dict[str, Any]) -> Hints:
    """Of several names of a session the more specific one counts: headers before fields."""
    debug, session = False, None
    for name, value in headers:
        if name == DEBUG:
            debug = True
        elif name in _SESSION_HEADERS and value:
            session = value.decode("latin-1")
    for field in _SESSION_FIELDS:
        named = fields.get(field)
        if session is None and isinstance(named, str) and named:
            session = named
    return Hints(debug, None if session is None else session[:_SESSION_CHARS])


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request goes on every worker: method, path with query as the client sent them."""

    method: bytes
    path: bytes
    headers: tuple[tuple[bytes, bytes], ...]


def request_head(target: Target, authority: bytes, prefix: bytes, body_bytes: int) -> bytes:
    """The head that is sent to a worker: hop-by-hop headers dropped, the length always true."""
    lines = [b"%s %s%s HTTP/1.1\r\nhost: %s\r\n" % (target.method, prefix, target.path, authority)]
    lines += [b"%s: %s\r\n" % header for header in target.headers]
    lines.append(b"content-length: %d\r\n\r\n" % body_bytes)
    return b"".join(lines)


def to_worker(headers: Headers, identity: bytes) -> tuple[tuple[bytes, bytes], ...]:
    """The client's headers less those that end here, with the request id."""
    dropped = _OURS_TO_WORKER
    if named := _named_by_connection(headers):
        dropped = dropped | named
    kept = [header for header in headers if header[0] not in dropped]
    return (*kept, (b"x-request-id", identity))


class Kind(Enum):
    """What the relay makes of an answer. The bytes of an encoded stream pass raw."""

    PLAIN = auto()
    EVENTS = auto()
    ENCODED_EVENTS = auto()


_DROPPED = {
    Kind.PLAIN: _OURS_TO_CLIENT,
    # An event may be withheld from it, and an error told in it: no length can be promised.
    Kind.EVENTS: _OURS_TO_CLIENT | _HINTS | {b"content-length"},
    Kind.ENCODED_EVENTS: _OURS_TO_CLIENT | _HINTS,
}


def kind_of(headers: Headers) -> Kind:
    events = encoded = False
    for name, value in headers:
        if name == b"content-type":
            events = value.startswith(b"text/event-stream")
        elif name == b"content-encoding":
            encoded |= value.lower() != b"identity"
    if not events:
        return Kind.PLAIN
    return Kind.ENCODED_EVENTS if encoded else Kind.EVENTS


def to_client(headers: Headers, kind: Kind, ours: Headers) -> list[tuple[bytes, bytes]]:
    """The worker's headers less those that end here, with ours.

    An event stream must reach the client as it is made, so that proxies are told not to keep it.
    """
    dropped = _DROPPED[kind]
    if named := _named_by_connection(headers):
        dropped = dropped | named
    kept = [header for header in headers if header[0] not in dropped]
    if kind is not Kind.PLAIN:
        kept += _AS_IT_IS_MADE
    kept += ours
    return kept


def _named_by_connection(headers: Headers) -> set[bytes]:
    """Header names that a Connection header declares to be for this hop."""
    named: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            named.update(token.strip().lower() for token in value.split(b","))
    return named
