"""Server-sent events of a streamed answer: bytes pass, the usage is read on the way. No I/O.

Two things are needed of a stream: its last bytes, which hold the usage and ``[DONE]``, and, where
the client did not ask for the usage event that ``--enable-force-include-usage`` adds, the removal
of that event. All other bytes pass untouched, in order, as soon as they came, however split.
"""

from __future__ import annotations

from collections import deque

import orjson

from gateway.api.dialect import CHAT, Dialect
from gateway.api.wire import find_usage
from gateway.core.request import Usage

_NO_CHOICES = (b'"choices":[]', b'"choices": []')
NOTHING = b"[]"
"""In every event that has no choices, and in few others: those are looked at more closely."""

_CHOICE = (b'"choices":[{', b'"choices": [{')
_END = b"\n\n"
TAIL_BYTES = 4096
MOST_PIECES = 64
"""Of those that pass framed, at least as many bytes as the tail has."""

_MAX_HELD_BYTES = 64 * 1024


class EventStream:
    """The answer of one streamed request.

    ``withhold`` removes the events that carry usage and no choices. An event of which too little
    has come to tell is held until it can be told; one that has a choice passes at once.

    Chunks of whole ordinary events may go to the client past ``feed`` (``gateway.api.through``)
    unless it is ``midway`` in an event; ``framed`` is told of them, framing and all.
    """

    def __init__(self, withhold: bool, dialect: Dialect = CHAT) -> None:
        self._withhold = withhold
        self._dialect = dialect
        self._tail: list[bytes] = []
        self.framed: deque[bytes] = deque(maxlen=MOST_PIECES)
        self.midway = False
        self._held = b""
        self._inside = False
        self._newline = False

    def _note(self, data: bytes) -> None:
        tail = self._tail
        if self.framed:
            tail += self._unframed()
        tail.append(data)
        if len(tail) >= MOST_PIECES or len(data) >= TAIL_BYTES:
            tail[:] = [self._last()]

    def _unframed(self) -> list[bytes]:
        """The last of what passed framed, as much as the tail can hold."""
        pieces: list[bytes] = []
        missing = TAIL_BYTES
        while self.framed and missing > 0:
            framed = self.framed.pop()
            missing -= len(framed)
            pieces.append(framed[framed.index(b"\n") + 1 : -2])
        self.framed.clear()
        pieces.reverse()
        return pieces

    def feed(self, data: bytes) -> bytes:
        """The bytes to pass on for the bytes that came; may be empty."""
        self._note(data)
        if not self._withhold:
            return data
        if NOTHING in data or self.midway or data[-2:] != _END:
            passed = self._filter(self._held + data)
            self.midway = self._inside or bool(self._held)
            return passed
        return data

    def finish(self) -> bytes:
        """What is still held when the worker's bytes end."""
        held, self._held = self._held, b""
        return held

    @property
    def usage(self) -> Usage | None:
        return find_usage(self._last())

    @property
    def ended(self) -> bool:
        """Whether the worker wrote the end of the stream."""
        last = self._last()
        lines = last.rstrip(b"\r\n")
        return len(last) - len(lines) >= 2 and self._dialect.ends(lines)

    @property
    def complete(self) -> bool:
        """Whether the answer is whole: vLLM also ends its streams when it was stopped, and when
        its engine died."""
        last = b"\n" + self._last()
        return self.ended and not any(mark in last for mark in self._dialect.broken)

    @property
    def between_events(self) -> bool:
        """Whether what was passed so far ends with the end of an event."""
        if self._withhold:
            return not self._inside
        last = self._last()
        return not last or last.endswith(_END)

    def _last(self) -> bytes:
        """The last bytes of the stream, the same ones however it was split."""
        if self.framed:
            self._note(b"")
        return b"".join(self._tail)[-TAIL_BYTES:]

    def _filter(self, data: bytes) -> bytes:
        self._held = b""
        passed: list[bytes] = []
        at = 0
        if self._inside:
            at = self._end_of_event(data)
            passed.append(data[:at])
        while not self._inside and (end := data.find(_END, at)) >= 0:
            event = data[at : end + 2]
            if not _is_usage(event):
                passed.append(event)
            at = end + 2
        rest = data[at:]
        if rest and _undecided(rest):
            self._held = rest
        elif rest:
            passed.append(rest)
            self._inside = True
            self._newline = rest.endswith(b"\n")
        return b"".join(passed)

    def _end_of_event(self, data: bytes) -> int:
        """Where the event ends of which a part has passed; all of ``data`` if it does not yet."""
        if self._newline and data.startswith(b"\n"):
            end = 1
        elif (found := data.find(_END)) >= 0:
            end = found + 2
        else:
            self._newline = data.endswith(b"\n")
            return len(data)
        self._inside = False
        return end


def _is_usage(event: bytes) -> bool:
    if not event.startswith(b"data:") or not _any(_NO_CHOICES, event):
        return False
    try:
        payload = orjson.loads(event[5:])
    except orjson.JSONDecodeError:
        return False
    return (
        isinstance(payload, dict)
        and payload.get("choices") == []
        and isinstance(payload.get("usage"), dict)
    )


def _undecided(part: bytes) -> bool:
    """Whether the beginning of an event may still turn out to be a usage event."""
    return (
        len(part) < _MAX_HELD_BYTES
        and part[:5] == b"data:"[: len(part)]
        and not _any(_CHOICE, part)
    )


def _any(keys: tuple[bytes, bytes], data: bytes) -> bool:
    """In a JSON string the quotes of a key would be escaped: a hit is a key, never text."""
    return keys[0] in data or keys[1] in data


_PLAIN_TAIL_BYTES = 128 * 1024
"""Of a plain answer so much is kept: behind ``usage`` vLLM writes the prompt's token ids if they
were asked for. Were that more, the answer would count as one without usage."""


class PlainAnswer:
    """An answer in one JSON body: everything passes, its end is kept to read the usage."""

    def __init__(self, dialect: Dialect = CHAT) -> None:
        self._mark = dialect.aborted
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._aborted = False
        self._edge = b""

    def feed(self, data: bytes) -> bytes:
        joined = self._edge + data
        self._aborted |= self._mark in joined
        self._edge = joined[-len(self._mark) :]
        kept = data[-_PLAIN_TAIL_BYTES:]
        self._tail.append(kept)
        self._tail_bytes += len(kept)
        while self._tail_bytes - len(self._tail[0]) >= _PLAIN_TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())
        return data

    def finish(self) -> bytes:
        return b""

    @property
    def usage(self) -> Usage | None:
        return find_usage(b"".join(self._tail)[-_PLAIN_TAIL_BYTES:])

    @property
    def complete(self) -> bool:
        return not self._aborted
