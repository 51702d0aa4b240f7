"""The blocks that one worker is believed to hold, as an engine does: least recently used out.

Invariants. The set is closed: with a block all blocks before it are held, and a parent was used no
earlier than its child. So the leading blocks of a chain are found by bisection. Each held block
belongs to the use that was the last to touch it, and a use's own blocks are one unbroken segment of
its chain, so that touching a chain cuts whole segments and no block is looked at twice.

What grows with the cache is flat, a dict of integers and arrays, into which the garbage collector
does not look: a million objects that it had to visit would cost it 40 ms.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from itertools import repeat
from typing import NamedTuple

from gateway.core.blocks import BlockHash, Chain


class Stored(NamedTuple):
    """What storing a chain did: the number of this use, how many leading blocks were held, and of
    the last of these the number of its use ``before`` (-1 without any) and ``age_tokens``, the
    tokens that have come into the cache since."""

    use: int
    held: int
    before: int
    age_tokens: int


class _Use(NamedTuple):
    """One touch of a chain: the blocks that no later use has touched, the first of which is block
    ``start`` of the chain, each of ``block_tokens`` tokens. ``at`` is ``HeldBlocks.added`` then."""

    blocks: array[int]
    start: int
    block_tokens: int
    at: int


class HeldBlocks:
    """One worker's blocks. ``last_use`` names the use that each belongs to; ``uses`` are in order
    of their time. ``credits``: behind this block an answer continues the cache up to that token,
    and so many tokens of it are not blocks of a chain. ``added``: tokens that ever came in.
    """

    __slots__ = ("added", "credits", "evicted", "last_use", "next_use", "tokens", "uses")

    def __init__(self) -> None:
        self.last_use: dict[BlockHash, int] = {}
        self.uses: OrderedDict[int, _Use] = OrderedDict()
        self.credits: dict[BlockHash, tuple[int, int]] = {}
        self.next_use = 0
        self.tokens = 0
        self.added = 0
        self.evicted = 0

    def clear(self) -> None:
        """Uses are counted on: what was stored before is no part of what comes."""
        self.last_use, self.uses, self.credits, self.tokens = {}, OrderedDict(), {}, 0

    def leading(self, hashes: tuple[BlockHash, ...], usable: int) -> int:
        """How many of the first ``usable`` blocks are held."""
        last_use = self.last_use
        if not usable or hashes[0] not in last_use:
            return 0
        if hashes[usable - 1] in last_use:
            return usable
        return bisect_left(hashes, True, 1, usable - 1, key=lambda block: block not in last_use)

    def touch(self, chain: Chain) -> Stored:
        hashes, last_use = chain.hashes, self.last_use
        held = self.leading(hashes, len(hashes))
        before, age_tokens = -1, 0
        if held:
            before = last_use[hashes[held - 1]]
            age_tokens = self.added - self.uses[before].at
            if held < len(hashes) and hashes[held - 1] in self.credits:
                self._spend(hashes[held - 1])
            self._cut(hashes, held)
        use = self.next_use
        self.next_use += 1
        new_tokens = (len(hashes) - held) * chain.block_tokens
        self.tokens += new_tokens
        self.added += new_tokens
        if hashes:
            last_use.update(zip(hashes, repeat(use), strict=False))
            self.uses[use] = _Use(array("Q", hashes), 0, chain.block_tokens, self.added)
        return Stored(use, held, before, age_tokens)

    def _cut(self, hashes: tuple[BlockHash, ...], end: int) -> None:
        """The first ``end`` blocks leave the uses that they belong to."""
        while end > 0:
            use = self.last_use[hashes[end - 1]]
            found = self.uses[use]
            if len(found.blocks) == end - found.start:
                del self.uses[use]
            else:
                rest = found.blocks[end - found.start :]
                self.uses[use] = found._replace(blocks=rest, start=end)
            end = found.start

    def credit(self, block: BlockHash, end_tokens: int, tokens: int) -> None:
        self._spend(block)
        self.credits[block] = (end_tokens, tokens)
        self.tokens += tokens
        self.added += tokens

    def _spend(self, block: BlockHash) -> None:
        """The generated tokens behind this block are blocks of a later prompt now, or gone."""
        end_tokens, tokens = self.credits.get(block, (0, 0))
        if tokens:
            self.credits[block] = (end_tokens, 0)
            self.tokens -= tokens

    def evict(self, capacity_tokens: int, capacity_blocks: int) -> None:
        while self.tokens > capacity_tokens or len(self.last_use) > capacity_blocks:
            use = next(iter(self.uses))
            self._drop_last(use, self.uses[use])
            self.evicted += 1

    def forget(self, stored: Stored) -> None:
        found = self.uses.get(stored.use)
        if found is None:
            return
        for _ in range(min(len(found.blocks), found.start + len(found.blocks) - stored.held)):
            self._drop_last(stored.use, found)

    def drop_before(self, use: int) -> None:
        while self.uses and (oldest := next(iter(self.uses))) < use:
            self._drop_last(oldest, self.uses[oldest])

    def _drop_last(self, use: int, of: _Use) -> None:
        block = BlockHash(of.blocks.pop())
        del self.last_use[block]
        self.tokens -= of.block_tokens + self.credits.pop(block, (0, 0))[1]
        if not of.blocks:
            del self.uses[use]
