"""What differs between the endpoints: how an answer ends, and how an error is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.api.errors import ApiError, anthropic_body, openai_body

_DONE = b"data: [DONE]"
_LINE_ENDS = (b"", b"\n", b"\r")
_ERROR_LINE = b'data: {"type":"error"'


@dataclass(frozen=True, slots=True)
class Dialect:
    """``endpoint`` as prompts are read by it. ``ends``: whether these last lines of a stream, line
    ends left out, are its end. ``broken``: marks in its last bytes of an answer that is not whole.
    ``aborted``: such a mark in an answer in one body."""

    endpoint: str
    ends: Callable[[bytes], bool]
    broken: tuple[bytes, ...]
    aborted: bytes
    error_body: Callable[[ApiError], bytes]
    adds_usage: bool = False
    error_line: bytes = b""


def _chat_ends(lines: bytes) -> bool:
    return lines.endswith(_DONE) and lines[: -len(_DONE)][-1:] in _LINE_ENDS


def _messages_end(lines: bytes) -> bool:
    """vLLM ends a stream with an error too, and nothing comes behind it."""
    last = lines[lines.rfind(b"\n") + 1 :]
    return last.endswith(b'{"type":"message_stop"}') or last.startswith(_ERROR_LINE)


_RESPONSE_ENDS = tuple(
    b'"type":"response.%b"}' % kind for kind in (b"completed", b"incomplete", b"failed")
)


def _responses_end(lines: bytes) -> bool:
    """The last event holds the whole answer, so that its first bytes may be long past."""
    return lines.endswith(_RESPONSE_ENDS)


_ABORTED = b'"finish_reason":"abort"'


def _completions(endpoint: str) -> Dialect:
    """vLLM also writes ``[DONE]`` when it was stopped (the finish reason is ``abort``) and when its
    engine died (an error is the last event). ``--enable-force-include-usage`` adds a usage event
    for all clients, which is kept from those that did not ask."""
    broken = (_ABORTED, b'\ndata: {"error":')
    return Dialect(endpoint, _chat_ends, broken, _ABORTED, openai_body, adds_usage=True)


CHAT = _completions("chat")
COMPLETIONS = _completions("completions")
MESSAGES = Dialect(
    "messages",
    _messages_end,
    (b'"delta":{"stop_reason":null', b"\n" + _ERROR_LINE),
    b'"stop_reason":null',
    anthropic_body,
    error_line=b"event: error\n",
)
RESPONSES = Dialect(
    "responses",
    _responses_end,
    (b'"status":"cancelled"', b'"status":"failed"'),
    b'"status":"cancelled"',
    openai_body,
)

DIALECTS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}


def of_path(path: str) -> Dialect:
    """The dialect in which an error about this path is told."""
    return DIALECTS.get(path, CHAT)
