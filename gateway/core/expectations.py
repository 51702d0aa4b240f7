"""Blocks that an engine should hold soon: those of prompts that were placed there.

They stand beside what its events tell, so that equal prompts arriving together meet. An answer may
be here before the event of the blocks that it computed: these are expected for two batches more,
in one of which that event must be.
"""

from __future__ import annotations

from collections import deque

from gateway.core.blocks import BlockHash, Chain
from gateway.core.prediction import Expected

_BATCHES = 2


class Expectations:
    """Owns how often each block is expected; ``blocks`` is to be read only."""

    def __init__(self) -> None:
        self.blocks: dict[BlockHash, int] = {}
        self._live: dict[int, tuple[Chain, int]] = {}
        self._answered: deque[tuple[int, Chain, int]] = deque()
        self._placed = 0

    def place(self, chain: Chain, start: int, batches: int) -> Expected:
        """A prompt was placed whose blocks from ``start`` on are not held yet; ``batches`` of
        events have come so far."""
        self._placed += 1
        self._live[self._placed] = (chain, start)
        self._add(chain, start)
        return Expected(self._placed, batches)

    def settle(self, expected: Expected, batches: int, told_later: bool) -> None:
        """Its request has ended; ``told_later``: the engine has computed blocks of it, of which it
        has not told yet."""
        live = self._live.pop(expected.number, None)
        if live is None:
            return  # the worker was emptied meanwhile
        chain, start = live
        if told_later and start < len(chain.hashes):
            self._answered.append((batches + _BATCHES, chain, start))
        else:
            self._drop(chain, start)

    def heard(self, batches: int) -> None:
        """So many batches have come."""
        while self._answered and self._answered[0][0] <= batches:
            _, chain, start = self._answered.popleft()
            self._drop(chain, start)

    def restart(self) -> list[Chain]:
        """The engine has emptied its cache, which it does between requests only: it will compute
        all of those that are under way. Returns these."""
        self.blocks.clear()
        self._answered.clear()
        chains = [chain for chain, _ in self._live.values()]
        for number, chain in zip(list(self._live), chains, strict=True):
            self._live[number] = (chain, 0)
            self._add(chain, 0)
        return chains

    def clear(self) -> None:
        self.blocks.clear()
        self._live.clear()
        self._answered.clear()

    def _add(self, chain: Chain, start: int) -> None:
        blocks = self.blocks
        for block in chain.hashes[start:]:
            blocks[block] = blocks.get(block, 0) + 1

    def _drop(self, chain: Chain, start: int) -> None:
        blocks = self.blocks
        for block in chain.hashes[start:]:
            left = blocks[block] - 1
            if left:
                blocks[block] = left
            else:
                del blocks[block]
