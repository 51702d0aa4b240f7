"""One line per request, when it has ended: in the log, and in the request log if there is one.

Lines are made and written together a few times a second: a write for each would cost more than all
else that is done when a request ends.
"""

from __future__ import annotations

import asyncio
from time import localtime, monotonic, strftime, time
from typing import TextIO

from gateway.observe.record import Record
from gateway.observe.request_log import RequestLog

_EVERY_SECONDS = 0.25


class Journal:
    """Holds the ended requests until they are written, to whichever of the two there is.

    Must be used inside a running event loop.
    """

    def __init__(self, lines: TextIO | None, log: RequestLog | None = None) -> None:
        self._lines = lines
        self._log = log
        self._ended: list[tuple[Record, float]] = []
        self._timer: asyncio.TimerHandle | None = None

    def request_ended(self, record: Record, now: float) -> None:
        if self._lines is None and self._log is None:
            return
        self._ended.append((record, now))
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_EVERY_SECONDS, self.flush)

    def flush(self) -> None:
        """Write what has ended so far."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ended, self._ended = self._ended, []
        to_wall = time() - monotonic()
        if self._log is not None and ended:
            self._log.write(ended, to_wall)
        if self._lines is not None and ended:
            text = "".join([_line(record, now, to_wall) for record, now in ended])
            self._lines.write(text)
            self._lines.flush()

    def close(self) -> None:
        """Returns when all is written."""
        self.flush()
        if self._log is not None:
            self._log.close()


def _line(record: Record, now: float, to_wall: float) -> str:
    """``key=value`` pairs; what is not known is left out. Never text of a prompt or an answer."""
    at = now + to_wall
    parts = [
        f"{strftime('%Y-%m-%d %H:%M:%S', localtime(at))},{int(at * 1000) % 1000:03d} INFO request:",
        f"id={record.request_id.decode('latin-1')}",
        f"endpoint={record.endpoint}",
        f"outcome={record.outcome}",
        f"seconds={now - record.started_at:.4f}",
    ]
    if record.first_byte_at is not None:
        parts.append(f"first_byte_seconds={record.first_byte_at - record.started_at:.4f}")
    if record.fallback is not None:
        parts.append(f"fallback={record.fallback}")
    if record.worker:
        parts.append(f"worker={record.worker}")
        parts.append(f"predicted_tokens={record.predicted_cached_tokens}")
    usage = record.usage
    if usage is not None:
        parts.append(f"prompt_tokens={usage.prompt_tokens}")
        if usage.cached_tokens is not None:
            parts.append(f"delivered_tokens={usage.cached_tokens}")
        parts.append(f"completion_tokens={usage.completion_tokens}")
    if record.costs:
        costs = ",".join([f"{one.worker_id}:{one.seconds:.4f}" for one in record.costs])
        parts.append(f"cost_seconds={costs}")
    if record.shadow is not None:
        parts.append(f"shadow_worker={record.shadow.worker_id}")
        parts.append(f"shadow_predicted_tokens={record.shadow.cached_tokens}")
    return " ".join(parts) + "\n"
