"""How many requests begin between two looks at the sockets.

A thousand requests that come in one instant would otherwise all be read, placed and sent in one
turn of the event loop, and the chunks of the streams that run would wait for the last of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

_EACH_TURN = 8
"""About a millisecond of work."""


class Pace:
    """Of one event loop. Those that come slower than that begin at once."""

    def __init__(self) -> None:
        self._begun = 0
        self._waiting: deque[Callable[[], None]] = deque()

    def begin(self, loop: asyncio.AbstractEventLoop, start: Callable[[], None]) -> None:
        """Call ``start`` now, or in its turn."""
        if self._begun >= _EACH_TURN:
            self._waiting.append(start)
            return
        if not self._begun:
            loop.call_soon(self._next, loop)
        self._begun += 1
        start()

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """What is called from here on comes behind what the sockets have brought."""
        waiting = self._waiting
        self._begun = min(len(waiting), _EACH_TURN)
        if self._begun:
            loop.call_soon(self._next, loop)
        for _ in range(self._begun):
            waiting.popleft()()
