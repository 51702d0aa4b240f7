"""Whether a worker's cache is what it is believed to be, judged by what its engine delivered.

Two things go wrong with a belief. The whole cache may be lost at once without a word (somebody
resets it, or puts the engine to sleep and wakes it): then prompts seen a moment ago are not found.
Or it holds less than its size says (generated tokens, other users, fragments take room): then only
prompts not seen for long are not found. The age of the deepest matched block, in tokens that have
come in since, tells the two apart.
"""

from __future__ import annotations

from typing import NamedTuple

_OLD_SHARE = 0.25
"""A block with so much of the cache come in since its last use may well have been evicted."""

_WHOLE_SHARE, _MISSED_SHARE = 0.9, 0.5
"""A prediction of which more was found is right; one of which less was found has failed."""

_LOST_AFTER = 3
"""Missed predictions, one after the other, of what must be there."""

_LEAST_SHARE = 0.05
_SHRINK, _GROW = 0.95, 1.01
"""At one old prompt missed in five found the capacity stands still."""


class Delivered(NamedTuple):
    """One prediction and what came of it. ``age_share``: tokens that came into the cache between
    the last use of the deepest matched block and the placement, over the engine's capacity;
    ``before``: the number of that use; ``use``: that of the placement itself."""

    predicted_tokens: int
    cached_tokens: int
    age_share: float
    before: int
    use: int


class Belief:
    """``share`` is the part of the engine's capacity that counts. Owned by its worker."""

    __slots__ = ("_answered", "_missed", "_suspect_from", "share")

    def __init__(self) -> None:
        self.share = 1.0
        self._answered = -1
        self._missed = 0
        self._suspect_from = 0

    def renew(self) -> None:
        """A new generation: nothing is suspected of it."""
        self._missed = 0

    def judge(self, delivered: Delivered) -> int | None:
        """The number of the first use that the cache may still hold, when it was lost; else
        None."""
        computed = delivered.before <= self._answered
        self._answered = max(self._answered, delivered.use)
        if not delivered.predicted_tokens or not computed:
            return None
        found_share = delivered.cached_tokens / delivered.predicted_tokens
        if delivered.age_share > _OLD_SHARE * self.share:
            self._resize(found_share)
            return None
        if found_share >= _MISSED_SHARE:
            # A prompt computed since the first miss proves nothing of what was there before.
            if delivered.before < self._suspect_from:
                self._missed = 0
            return None
        if not self._missed:
            self._suspect_from = delivered.use
        self._missed += 1
        if self._missed < _LOST_AFTER:
            return None
        self._missed = 0
        return self._suspect_from

    def _resize(self, found_share: float) -> None:
        if found_share < _WHOLE_SHARE:
            self.share = max(_LEAST_SHARE, self.share * _SHRINK)
        else:
            self.share = min(1.0, self.share * _GROW)
