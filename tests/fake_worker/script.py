"""What one answer does: the request's `x-fake-script` header (JSON) says it, or the test does."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

SCRIPT_HEADER = b"x-fake-script"


@dataclass(frozen=True, kw_only=True)
class Script:
    """The defaults answer as vLLM does: the head of a stream at once, one HTTP chunk per event.

    An event is one `data: ...` of a stream, `[DONE]` included; gates and cuts count from 0.
    """

    # What is said. `status` other than 200 answers `body`, or an error in vLLM's shape.
    status: int = 200
    body: Any = None
    headers: tuple[tuple[str, str], ...] = ()
    informational: tuple[int, ...] = ()
    tokens: int | None = None  # generated; else max_tokens, else 8
    text: str = " tok"  # of each token
    finish_reason: str = "stop"
    usage: bool | None = None  # None: as the worker is started; False: never
    size_bytes: int | None = None  # a plain answer about this big
    error_event: bool = False  # vLLM's error inside a stream, before [DONE]
    events: tuple[str, ...] | None = None  # a stream's events, whatever the request wants
    instead: str | None = None  # these bytes (latin-1) instead of an HTTP answer, then FIN

    # When. A gate holds until the test opens it: "head", "body", or an event's number.
    hold: bool = False  # never answer
    head_delay_seconds: float = 0
    body_delay_seconds: float = 0
    gap_seconds: float = 0
    gates: dict[str, str] = field(default_factory=dict)

    # How it is written.
    framing: Literal["auto", "chunked", "length", "eof"] = "auto"
    http_version: str = "1.1"
    content_encoding: Literal["gzip"] | None = None
    trailers: tuple[tuple[str, str], ...] = ()
    rechunk_bytes: int | None = None  # HTTP chunks of this size, whatever the events
    rechunk_at: tuple[int, ...] | None = None  # HTTP chunks that end at these body positions
    head_with_body: bool = False  # the head in one write with the first piece of a body
    split_bytes: int | None = None  # each write to the socket has this many bytes
    close: bool = False  # say `connection: close` and do it
    drop_idle: bool = False  # close after the answer without having said so

    # How it breaks: before the head (cut_after None), or after so many events of a stream (and
    # cut_inside bytes of the next), or so many body bytes of a plain answer. `clean` is a proper
    # last chunk where events are missing.
    cut: Literal["rst", "fin", "clean"] | None = None
    cut_after: int | None = None
    cut_inside: int = 0

    @classmethod
    def from_json(cls, text: str | bytes) -> Script:
        """Raises TypeError for an unknown key, ValueError for what is not JSON."""
        return cls(**json.loads(text))

    def header(self) -> tuple[str, str]:
        """The request header that asks for this script."""
        plain = Script()
        wanted = {k: v for k, v in vars(self).items() if v != getattr(plain, k)}
        return SCRIPT_HEADER.decode(), json.dumps(wanted)
