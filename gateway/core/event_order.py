"""A worker's numbered batches of events in their order, whatever the network made of it.

Batches are numbered from 0 by each engine process. What comes early waits until what is missing
was replayed; where that fails the cache that was followed is worthless: ``Step.LOST`` comes before
the next batch. A low number with a newer time than all before is another engine's, and so is a
replay in which the last batch that we know has another time than it had. Decides only: the caller
sends what is asked for, and applies what is handed out in the order of the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from gateway.core.engine_cache import Event

MOST_WAITING = 20_000
"""Batches; twice what vLLM keeps for a replay by default."""


class Batch(NamedTuple):
    """``at``: seconds since the epoch by the engine's clock."""

    number: int
    at: float
    events: Sequence[Event]


class Step(Enum):
    ASK = "ask"
    """Ask for a replay from ``EventOrder.ask_from`` on."""
    LOST = "lost"
    """Events are missing for good."""
    RESTARTED = "restarted"
    """What follows is of an engine that began with an empty cache."""
    COMPLETE = "complete"
    """A replay has ended and nothing is missing."""


class EventOrder:
    """Owns the place in the stream; ``replays``: whether a replay can be asked for."""

    def __init__(self, replays: bool) -> None:
        self.next = 0
        self.gaps = 0
        self.replays = 0
        self._replays = replays
        self._newest = float("-inf")
        self._last_at = 0.0
        self._asked: int | None = None
        self._ends_to_skip = 0
        self._waiting: dict[int, Batch] = {}

    @property
    def ask_from(self) -> int:
        """The last batch that is known once more, to see that it is the same."""
        return max(0, self.next - 1)

    @property
    def behind(self) -> bool:
        """Batches are here that cannot be applied before others."""
        return bool(self._waiting)

    def join(self) -> list[Batch | Step]:
        """At the start: what happened before we came."""
        return self._ask() if self._replays else []

    def live(self, batch: Batch) -> list[Batch | Step]:
        """A batch as it is published."""
        steps: list[Batch | Step] = []
        if batch.number < self.next:
            if batch.at <= self._newest:
                return steps
            steps.append(self._restart())
        if batch.number > self.next and self._asked is None:
            self.gaps += 1
        return steps + self._take(batch)

    def replayed(self, batch: Batch) -> list[Batch | Step]:
        if batch.number == self.next - 1 and batch.at != self._last_at and self._asked is not None:
            self._ends_to_skip += 1
            return [self._restart(), *self._ask()]
        return [] if batch.number < self.next else self._take(batch)

    def replay_ended(self) -> list[Batch | Step]:
        """All of the replay has come, or it is given up waiting for it."""
        if self._ends_to_skip:
            self._ends_to_skip -= 1
            return []
        asked, self._asked = self._asked, None
        if asked is None:
            return []
        if not self._waiting:
            return [Step.COMPLETE]
        return self._ask() if self.next > asked else self._give_up()

    def _take(self, batch: Batch) -> list[Batch | Step]:
        if batch.number == self.next and not self._waiting:
            return [self._passed(batch)]
        self._waiting[batch.number] = batch
        steps = self._drain()
        if len(self._waiting) > MOST_WAITING:
            self._asked = None
            return steps + self._give_up()
        if self._waiting and self._asked is None:
            return steps + (self._ask() if self._replays else self._give_up())
        return steps

    def _restart(self) -> Step:
        self.next, self._newest, self._asked = 0, float("-inf"), None
        self._waiting.clear()
        return Step.RESTARTED

    def _drain(self) -> list[Batch | Step]:
        steps: list[Batch | Step] = []
        while (batch := self._waiting.pop(self.next, None)) is not None:
            steps.append(self._passed(batch))
        return steps

    def _give_up(self) -> list[Batch | Step]:
        """Go on with what there is; each hole costs all that was known before it."""
        steps: list[Batch | Step] = []
        while self._waiting:
            steps.append(Step.LOST)
            self.next = min(self._waiting)
            steps += self._drain()
        return steps

    def _ask(self) -> list[Batch | Step]:
        self._asked = self.next
        self.replays += 1
        return [Step.ASK]

    def _passed(self, batch: Batch) -> Batch:
        self.next = batch.number + 1
        self._last_at = batch.at
        self._newest = max(self._newest, batch.at)
        return batch
