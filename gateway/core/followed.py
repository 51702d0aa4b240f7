"""One worker's engine as its events tell of it, and whether they are to be believed."""

from __future__ import annotations

from gateway.core.blocks import Chain
from gateway.core.engine_cache import EngineCache
from gateway.core.expectations import Expectations
from gateway.core.prediction import Expected

_SILENT = 3
"""So many answers in a row that computed whole blocks, and no event since: the events stopped."""

_COVERED = 0.9
"""Share of the engine's blocks that must be known before what was missed matters no more."""


class Followed:
    """One worker's engine as its events tell of it.

    ``alive``: its stream is followed. ``partial``: it may hold blocks that we do not know.
    ``hybrid``: it has several caches, and a hit needs all of them.
    """

    def __init__(self) -> None:
        self.cache = EngineCache()
        self.expected = Expectations()
        self.alive = self.partial = self.hybrid = False
        self.capacity_blocks: int | None = None
        self.batches = self.silent = self.resets = 0

    @property
    def trusted(self) -> bool:
        return self.alive and not self.partial and not self.hybrid and self.silent < _SILENT

    def began(self) -> None:
        """An engine that has just started: it holds nothing."""
        self.cache.clear()
        self.partial = self.hybrid = False

    def cleared(self) -> list[Chain]:
        """The engine has emptied its cache. Returns the prompts that it will compute all the
        same."""
        self.began()
        return self.expected.restart()

    def emptied(self) -> None:
        """The engine holds nothing; it is followed on."""
        self.began()
        self.expected.clear()

    def ended(self) -> None:
        """Nobody follows any more."""
        self.emptied()
        self.alive = False

    def lost(self) -> None:
        """Events are missing: what was known may be gone, and more may be there."""
        self.resets += 1
        self.cache.clear()
        self.partial = True

    def applied(self) -> None:
        """All events of a batch were applied."""
        self.alive = True
        self.batches += 1
        self.silent = 0
        self.expected.heard(self.batches)
        if self.capacity_blocks is None:
            return
        if self.cache.copies > self.capacity_blocks:
            self.lost()  # more than there can be: something was told twice
        elif self.cache.copies >= _COVERED * self.capacity_blocks:
            self.partial = False

    def told(self, chain: Chain) -> int | None:
        """Leading blocks that count as cached; None where the events are not to be believed."""
        if not chain.exact or not self.trusted:
            return None
        return self.cache.leading(chain.hashes, chain.usable_blocks, self.expected.blocks)

    def expect(self, chain: Chain) -> Expected | None:
        if not self.alive or not chain.exact:
            return None
        start = self.cache.leading(chain.hashes, len(chain.hashes), {})
        return self.expected.place(chain, start, self.batches)

    def settled(self, chain: Chain, placed: Expected, computed_tokens: int) -> None:
        """The request has ended; the engine computed so many tokens of it, 0 if none or unknown."""
        told_later = computed_tokens > 0 and self.trusted and not self.cache.holds_all(chain)
        self.expected.settle(placed, self.batches, told_later)
        if computed_tokens > chain.block_tokens and placed.batches == self.batches:
            self.silent += 1
