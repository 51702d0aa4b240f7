"""Which worker is believed to hold which block.

The belief is optimistic: blocks are stored when a prompt is placed, before the engine has computed
them, so that equal prompts arriving together meet. Each worker's set is an LRU bounded by the
engine's own block count. Within one prompt the tail is the oldest: vLLM evicts the tail of a chain
first, and evicting a root first would make the rest unmatchable.

Invariants. The set is closed: with a block all blocks before it are held, and a parent was used no
earlier than its child. So the leading blocks of a chain are found by bisection. Each held block
belongs to the use that was the last to touch it, and a use's own blocks are one unbroken segment of
its chain, so that touching a chain cuts whole segments and no block is looked at twice.

What grows with the cache is two flat containers of integers, a dict and arrays, into which the
garbage collector does not look: a million objects that it had to visit would cost it 40 ms.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from itertools import repeat
from typing import NamedTuple

from gateway.core.blocks import BlockHash, Chain
from gateway.core.worker import Stored, WorkerId


class _Use(NamedTuple):
    """One touch of a chain: the blocks that no later use has touched, the first of which is block
    ``start`` of the chain, each of ``block_tokens`` tokens."""

    blocks: array[int]
    start: int
    block_tokens: int


class _Held:
    """One worker's blocks. ``last_use`` names the use that each belongs to; ``uses`` are in order
    of their time; ``credits`` says up to which token an answer continues the cache behind a block.
    """

    __slots__ = ("credits", "evicted", "last_use", "next_use", "tokens", "uses")

    def __init__(self) -> None:
        self.last_use: dict[BlockHash, int] = {}
        self.uses: OrderedDict[int, _Use] = OrderedDict()
        self.credits: dict[BlockHash, int] = {}
        self.next_use = 0
        self.tokens = 0
        self.evicted = 0

    def clear(self) -> None:
        """Uses are still counted on: what was stored before is no part of what comes."""
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
        self._cut(hashes, held)
        use = self.next_use
        self.next_use += 1
        if hashes:
            last_use.update(zip(hashes, repeat(use), strict=False))
            self.uses[use] = _Use(array("Q", hashes), 0, chain.block_tokens)
        self.tokens += (len(hashes) - held) * chain.block_tokens
        return Stored(use, held)

    def _cut(self, hashes: tuple[BlockHash, ...], end: int) -> None:
        """The first ``end`` blocks leave the uses that they belong to."""
        while end > 0:
            use = self.last_use[hashes[end - 1]]
            blocks, start, block_tokens = self.uses[use]
            if len(blocks) == end - start:
                del self.uses[use]
            else:
                self.uses[use] = _Use(blocks[end - start :], end, block_tokens)
            end = start

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

    def _drop_last(self, use: int, of: _Use) -> None:
        block = BlockHash(of.blocks.pop())
        del self.last_use[block]
        self.tokens -= of.block_tokens
        self.credits.pop(block, None)
        if not of.blocks:
            del self.uses[use]


class PrefixIndex:
    """Blocks per worker; owns its state, bounded by ``max_blocks`` over all workers."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._held: dict[WorkerId, _Held] = {}

    def add(self, worker_id: WorkerId) -> None:
        self._held[worker_id] = _Held()
        for held in self._held.values():
            held.evict(held.tokens, self._share)

    def remove(self, worker_id: WorkerId) -> None:
        del self._held[worker_id]

    def drop(self, worker_id: WorkerId) -> None:
        """Forget all blocks and credits of a worker: its cache is empty."""
        self._held[worker_id].clear()

    def blocks(self, worker_id: WorkerId) -> int:
        return len(self._held[worker_id].last_use)

    def evicted(self, worker_id: WorkerId) -> int:
        """Blocks that had to make room for others, since the worker was added."""
        return self._held[worker_id].evicted

    def match(self, worker_id: WorkerId, chain: Chain) -> int:
        """Leading blocks of ``chain`` that the worker holds, generated tokens included."""
        held = self._held[worker_id]
        usable = chain.usable_blocks
        matched = held.leading(chain.hashes, usable)
        if 0 < matched < usable and held.credits:
            credit = held.credits.get(chain.hashes[matched - 1], 0) // chain.block_tokens
            if credit > matched:
                return min(credit, usable)
        return matched

    def store(self, worker_id: WorkerId, chain: Chain, capacity_tokens: int) -> Stored:
        """Make the chain the most recently used blocks of the worker; evict past its capacity."""
        held = self._held[worker_id]
        stored = held.touch(chain)
        held.evict(capacity_tokens, self._share)
        return stored

    def forget(self, worker_id: WorkerId, stored: Stored) -> None:
        """The prompt was never computed: the blocks that came with it and that no later prompt has
        touched are not there."""
        self._held[worker_id].forget(stored)

    def credit(self, worker_id: WorkerId, chain: Chain, end_tokens: int) -> None:
        """Note that the cache continues behind the last block of ``chain`` up to ``end_tokens``."""
        held = self._held[worker_id]
        if chain.hashes and chain.hashes[-1] in held.last_use:
            held.credits[chain.hashes[-1]] = end_tokens

    @property
    def _share(self) -> int:
        return self._max_blocks // len(self._held)
