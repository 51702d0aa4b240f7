"""Request logs that a simulation replays: Mooncake's traces and the gateway's own log.

One JSON object a line, as plain text, ``.gz`` or ``.xz`` (told by the first bytes, not the name):

- ``timestamp``: when the request arrived, milliseconds, any epoch; only differences count.
- ``input_length``: prompt tokens, at least 1. ``output_length``: generated tokens.
- ``hash_ids``: integers, the chain of the prompt's blocks in order. Equal ids mean equal prompts up
  to the end of that block. One for each full block or fewer (none: nothing is known of the
  prompt); an id for a last block that is not full, as Mooncake has it, is left out.
- ``block_size``: tokens of a block; 512, Mooncake's, where it is absent. Lines may differ in it. A
  long chain can be thinned: each n-th id with n times the block size is a chain too.
- ``finished``: when the request ended, milliseconds, same epoch. Lines that have it are written as
  requests end and come in any order of arrival; all others must be in order of ``timestamp``.

Other keys are not read. The gateway's log is this form with ``block_size`` and ``finished``; it
holds hashes and lengths, never text. Requests of which a length is not known are not in it.
"""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

from gateway.core.blocks import BlockHash, Chain

MOONCAKE_BLOCK_TOKENS = 512

_END = 1e15
"""Milliseconds; whatever is later, infinity and NaN are no time."""

_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ"


class TraceError(Exception):
    """The trace cannot be replayed; the message names the file, the line and what is wrong."""


class Arrival(NamedTuple):
    """One request; ``at_seconds`` counts from the first of its trace."""

    at_seconds: float
    chain: Chain
    output_tokens: int


def read_trace(path: Path) -> list[Arrival]:
    """The requests in order of arrival, at least one; raises TraceError."""
    found: list[Arrival] = []
    latest = -1e300
    number = 0
    try:
        for line in _lines(path):
            number += 1
            if line.isspace():
                continue
            record = _record(line)
            arrival = _arrival(record)
            if "finished" not in record:
                if arrival.at_seconds < latest:
                    raise ValueError("earlier than the line before: lines are not in order of time")
                latest = arrival.at_seconds
            found.append(arrival)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except (EOFError, lzma.LZMAError, zlib.error) as error:
        raise TraceError(f"{path}: broken archive: {error}") from error
    except UnicodeDecodeError:
        raise TraceError(f"{path}, line {number + 1}: not UTF-8 text") from None
    except ValueError as error:
        raise TraceError(f"{path}, line {number}: {error}") from None
    if not found:
        raise TraceError(f"{path}: no requests")
    found.sort(key=lambda arrival: arrival.at_seconds)
    start = found[0].at_seconds
    return [arrival._replace(at_seconds=arrival.at_seconds - start) for arrival in found]


def _lines(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        first = file.peek(len(_XZ))
        unpack = gzip.open if first.startswith(_GZIP) else lzma.open
        packed = first.startswith((_GZIP, _XZ))
        with TextIOWrapper(unpack(file) if packed else file, encoding="utf-8") as text:
            yield from text


def _record(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


def _arrival(record: dict[str, Any]) -> Arrival:
    stamp = record.get("timestamp")
    if not isinstance(stamp, int | float) or isinstance(stamp, bool) or not -_END < stamp < _END:
        raise ValueError("timestamp must be a number of milliseconds")
    prompt_tokens = _count(record, "input_length", 1)
    block_tokens = _count({"block_size": MOONCAKE_BLOCK_TOKENS, **record}, "block_size", 1)
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or any(type(one) is not int for one in ids):
        raise ValueError("hash_ids must be a list of integers")
    if len(ids) > -(-prompt_tokens // block_tokens):
        blocks = f"{prompt_tokens} tokens in blocks of {block_tokens}"
        raise ValueError(f"{len(ids)} hash_ids are too many for {blocks}")
    hashes = tuple(map(BlockHash, ids[: prompt_tokens // block_tokens]))
    chain = Chain(hashes, block_tokens, prompt_tokens)
    return Arrival(stamp / 1e3, chain, _count(record, "output_length", 0))


def _count(record: dict[str, Any], name: str, least: int) -> int:
    value = record.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}")
    return value
