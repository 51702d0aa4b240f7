"""The request log: what came and how long it was, for a simulation to replay. Never text.

One JSON object a line, in the form that ``gateway simulate`` reads: ``timestamp`` and ``finished``
in milliseconds since the epoch, ``input_length`` and ``output_length`` in tokens, ``hash_ids`` of
the prompt's full blocks and their ``block_size`` in tokens. Only requests whose lengths are known.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson

from gateway.observe.record import Record

log = logging.getLogger(__name__)


class LogFileFailed(Exception):
    """The file cannot be opened; says which and why."""


class RequestLog:
    """Appends to one file, in a thread of its own: a disk may be slow."""

    def __init__(self, path: Path) -> None:
        """Raises LogFileFailed."""
        try:
            self._file = path.open("ab")
        except OSError as error:
            raise LogFileFailed(f"request log {path}: {error.strerror or error}") from error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="request-log")

    def write(self, ended: Sequence[tuple[Record, float]], to_wall: float) -> None:
        """``ended``: records and the times of their ends; ``to_wall`` makes them epoch seconds."""
        self._thread.submit(self._append, ended, to_wall)

    def close(self) -> None:
        """Returns when all is written."""
        self._thread.shutdown(wait=True)
        self._file.close()

    def _append(self, ended: Sequence[tuple[Record, float]], to_wall: float) -> None:
        lines = [_line(record, now, to_wall) for record, now in ended]
        try:
            self._file.write(b"".join(lines))
            self._file.flush()
        except OSError as error:
            log.warning("request log: %d lines are lost: %s", len(ended), error)


def _line(record: Record, now: float, to_wall: float) -> bytes:
    chain, usage = record.chain, record.usage
    if usage is None or not chain.hashes:
        return b""
    line = {
        "timestamp": round((record.started_at + to_wall) * 1e3),
        "finished": round((now + to_wall) * 1e3),
        "input_length": chain.prompt_tokens,
        "output_length": usage.completion_tokens,
        "block_size": chain.block_tokens,
        "hash_ids": chain.hashes,
    }
    return orjson.dumps(line) + b"\n"
