"""The hottest path: a chunk from the worker's socket to the client's, in one call.

Nearly every chunk of a stream is one whole chunk of whole events that all pass. It is told by a few
comparisons, kept for the reading of usage, and written to the client as it came. Everything else
goes the long way, through the parser. One function of no calls but the needed ones: each further
frame would cost a tenth of what the whole does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.api.sse import MOST_PIECES, NOTHING, TAIL_BYTES, EventStream
from gateway.upstream.protocol import Connection

_END = b"\n\n\r\n"
_LEAST_BYTES, _MOST_BYTES = TAIL_BYTES // MOST_PIECES, 2048
"""Shorter than any chunk with an event of a model, longer than the one with ``[DONE]``, and so long
that the chunks that are kept fill the tail; and as long as usual ones are."""


def _lines_by_framed_size() -> tuple[bytes, ...]:
    """What a chunk of so many bytes, framing included, begins with. No other chunk of that size
    does, and neither does anything that is not one whole chunk."""
    lines = [b"no chunk has this size"] * _MOST_BYTES
    for size in range(_LEAST_BYTES, _MOST_BYTES):
        line = b"%x\r\n" % size
        framed = len(line) + size + 2
        if framed < _MOST_BYTES:
            lines[framed] = line
    return tuple(lines)


_LINES = _lines_by_framed_size()


def let_through(
    stream: EventStream, connection: Connection, transport: asyncio.WriteTransport
) -> Callable[[bytes], None]:
    """What is to receive a worker's bytes in the parser's place; ``transport`` is the client's."""
    keep, parse = stream.framed.append, connection.parse
    write, closing = transport.write, transport.is_closing

    def receive(data: bytes) -> None:
        size = len(data)
        if (
            size < _MOST_BYTES
            and connection.at_chunk
            and data.startswith(_LINES[size])
            and data.endswith(_END)
            and NOTHING not in data
            and not stream.midway
        ):
            keep(data)
            connection.heard = True
            if not closing():
                write(data)
        else:
            parse(data)

    return receive
