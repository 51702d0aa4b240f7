"""Signs of life in a silent stream, for proxies that drop what is silent for a minute.

Off unless ``heartbeat_seconds`` is set. A comment line (``: ping``) is ignored by every client of
event streams. Before the first token it takes our head with it: from then on an error of the
worker can only be told inside the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from time import monotonic
from typing import Any, TypeVar

from gateway.api.outgoing import Outgoing
from gateway.core.reservation import Reservation

T = TypeVar("T")


async def beating(
    work: Coroutine[Any, Any, T], seconds: float, out: Outgoing, reservation: Reservation
) -> T:
    """Await ``work``; whenever nothing was sent for ``seconds`` meanwhile, send a comment."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        while True:
            left = out.sent_at + seconds - monotonic()
            if left <= 0 and out.between_events:
                await out.ping(reservation)
                left = seconds
            await asyncio.wait((task,), timeout=left if left > 0 else seconds)
            if task.done():
                return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
