"""Which worker is believed to hold which block.

The belief is optimistic: blocks are stored when a prompt is placed, before the engine has computed
them, so that equal prompts arriving together meet. Each worker's set is an LRU bounded by the
engine's own block count. Within one prompt the tail is the oldest: vLLM evicts the tail of a chain
first, and evicting a root first would make the rest unmatchable.

A block maps to an ``int`` (no object that the garbage collector would have to visit): 0, or the
number of tokens, counted from the start of the prompt, that an answer has left in the cache behind
this block, when the block is the last full one of an answered prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from gateway.core.blocks import BlockHash, Chain
from gateway.core.worker import WorkerId


class PrefixIndex:
    """Blocks per worker; owns its state, bounded by ``max_blocks`` over all workers."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._held: dict[WorkerId, OrderedDict[BlockHash, int]] = {}

    def add(self, worker_id: WorkerId) -> None:
        self._held[worker_id] = OrderedDict()

    def remove(self, worker_id: WorkerId) -> None:
        del self._held[worker_id]

    def drop(self, worker_id: WorkerId) -> None:
        """Forget all blocks and credits of a worker: its cache is empty."""
        self._held[worker_id] = OrderedDict()

    def blocks(self, worker_id: WorkerId) -> int:
        return len(self._held[worker_id])

    def match(self, worker_id: WorkerId, chain: Chain) -> int:
        """Leading blocks of ``chain`` that the worker holds, generated tokens included."""
        held = self._held[worker_id]
        hashes = chain.hashes
        usable = chain.usable_blocks
        matched = 0
        while matched < usable:
            if hashes[matched] in held:
                matched += 1
                continue
            credit = held.get(hashes[matched - 1], 0) // chain.block_tokens if matched else 0
            if credit <= matched:
                break
            matched = min(credit, usable)
        return matched

    def store(self, worker_id: WorkerId, chain: Chain, capacity_tokens: int) -> None:
        """Make the chain the most recently used blocks of the worker; evict past its capacity."""
        held = self._held[worker_id]
        for block in reversed(chain.hashes):
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = 0
        capacity = min(capacity_tokens // chain.block_tokens, self._max_blocks // len(self._held))
        while len(held) > capacity:
            held.popitem(last=False)

    def forget(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """These blocks were stored for a prompt that was never computed."""
        held = self._held[worker_id]
        for block in hashes:
            held.pop(block, None)

    def credit(self, worker_id: WorkerId, hashes: Sequence[BlockHash], end_tokens: int) -> None:
        """Note that the cache continues behind the last of ``hashes`` up to ``end_tokens``."""
        held = self._held[worker_id]
        if hashes and hashes[-1] in held:
            held[hashes[-1]] = end_tokens
