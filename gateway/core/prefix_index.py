"""Which worker is believed to hold which block.

The belief is optimistic: blocks are stored when a prompt is placed, before the engine has computed
them, so that equal prompts arriving together meet. Each worker's set is an LRU bounded by the
engine's own block count. Within one prompt the tail is the oldest: vLLM evicts the tail of a chain
first, and evicting a root first would make the rest unmatchable.
"""

from __future__ import annotations

from gateway.core.blocks import Chain
from gateway.core.held_blocks import HeldBlocks, Stored
from gateway.core.reservation import WorkerId


class PrefixIndex:
    """Blocks per worker; owns its state, bounded by ``max_blocks`` over all workers."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._held: dict[WorkerId, HeldBlocks] = {}

    def add(self, worker_id: WorkerId) -> None:
        self._held[worker_id] = HeldBlocks()
        for held in self._held.values():
            held.evict(held.tokens, self._share)

    def remove(self, worker_id: WorkerId) -> None:
        del self._held[worker_id]

    def drop(self, worker_id: WorkerId) -> None:
        """Forget all blocks and credits of a worker: its cache is empty."""
        self._held[worker_id].clear()

    def drop_before(self, worker_id: WorkerId, use: int) -> None:
        """Forget what no use from ``use`` on has touched."""
        self._held[worker_id].drop_before(use)

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
            end_tokens, _ = held.credits.get(chain.hashes[matched - 1], (0, 0))
            return max(matched, min(end_tokens // chain.block_tokens, usable))
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

    def answered(
        self, worker_id: WorkerId, chain: Chain, capacity_tokens: int, end_tokens: int
    ) -> None:
        """A prompt's answer has ended: the engine frees its blocks now, so that they are its most
        recently used ones. Behind them the cache goes on up to ``end_tokens``."""
        if not chain.hashes:
            return
        held = self._held[worker_id]
        held.touch(chain)
        blocks_end = len(chain.hashes) * chain.block_tokens
        if end_tokens > blocks_end:
            held.credit(chain.hashes[-1], end_tokens, end_tokens - blocks_end)
        held.evict(capacity_tokens, self._share)

    @property
    def _share(self) -> int:
        return self.max_blocks // len(self._held)
