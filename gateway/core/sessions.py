"""Where the requests of one client session went last.

Only a hint, for prompts of which no worker has even the first block: agents that begin each system
prompt with a clock or a billing line have no prefix to go by. It decides between workers that cost
the same, and tells how often that happens.
"""

from __future__ import annotations

from collections import OrderedDict

from gateway.core.reservation import WorkerId

_MOST_SESSIONS = 100_000


class Sessions:
    """Session names and workers, the least recently seen forgotten first.

    ``diverged``: requests of a known session of which not even the first block was known.
    """

    def __init__(self) -> None:
        self.diverged = 0
        self._last: OrderedDict[str, WorkerId] = OrderedDict()

    def home(self, session: str | None) -> WorkerId | None:
        return None if session is None else self._last.get(session)

    def placed(self, session: str, worker_id: WorkerId) -> None:
        self._last[session] = worker_id
        self._last.move_to_end(session)
        if len(self._last) > _MOST_SESSIONS:
            self._last.popitem(last=False)
