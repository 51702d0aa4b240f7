"""What is foretold of one prompt on one worker."""

from __future__ import annotations

from typing import NamedTuple


class Prediction(NamedTuple):
    """Leading blocks that count as cached: by estimate, and by events (None: not to be had)."""

    estimated: int
    told: int | None = None

    @property
    def blocks(self) -> int:
        return self.estimated if self.told is None else self.told


UNKNOWN = Prediction(0)


class Expected(NamedTuple):
    """A placed prompt's entry among what is expected of its worker. ``batches``: how many batches
    of events there had been when it was placed."""

    number: int
    batches: int
