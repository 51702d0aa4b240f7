"""Which worker is believed to hold which block.

The belief is optimistic: blocks are stored when a prompt is placed, before the engine has computed
them, so that equal prompts arriving together meet. Each worker's set is an LRU bounded by the
engine's own block count. Within one prompt the tail is the oldest: vLLM evicts the tail of a chain
first, and evicting a root first would make the rest unmatchable.

A block maps to one ``int`` (no object that the garbage collector would have to visit): its tokens
in the low 16 bits, and above them, when the block is the last full one of an answered prompt, the
number of tokens, from the start of the prompt, that the answer has left in the cache behind it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from gateway.core.blocks import BlockHash, Chain
from gateway.core.worker import WorkerId

_TOKENS_BITS = 16
_TOKENS = (1 << _TOKENS_BITS) - 1


class _Held:
    """One worker's blocks, the least recently used first, and their sum of tokens."""

    __slots__ = ("blocks", "tokens")

    def __init__(self) -> None:
        self.blocks: OrderedDict[BlockHash, int] = OrderedDict()
        self.tokens = 0

    def evict(self, capacity_tokens: int, capacity_blocks: int) -> None:
        while self.tokens > capacity_tokens or len(self.blocks) > capacity_blocks:
            _, value = self.blocks.popitem(last=False)
            self.tokens -= value & _TOKENS


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
        self._held[worker_id] = _Held()

    def blocks(self, worker_id: WorkerId) -> int:
        return len(self._held[worker_id].blocks)

    def match(self, worker_id: WorkerId, chain: Chain) -> int:
        """Leading blocks of ``chain`` that the worker holds, generated tokens included."""
        held = self._held[worker_id].blocks
        hashes = chain.hashes
        usable = chain.usable_blocks
        matched = 0
        while matched < usable:
            if hashes[matched] in held:
                matched += 1
                continue
            last = held.get(hashes[matched - 1], 0) if matched else 0
            credit = (last >> _TOKENS_BITS) // chain.block_tokens
            if credit <= matched:
                break
            matched = min(credit, usable)
        return matched

    def store(self, worker_id: WorkerId, chain: Chain, capacity_tokens: int) -> int:
        """Make the chain the most recently used blocks of the worker; evict past its capacity.

        Returns how many leading blocks were there before.
        """
        held = self._held[worker_id]
        blocks = held.blocks
        leading = len(chain.hashes)
        for at in range(len(chain.hashes) - 1, -1, -1):
            block = chain.hashes[at]
            if block in blocks:
                blocks.move_to_end(block)
            else:
                blocks[block] = chain.block_tokens
                held.tokens += chain.block_tokens
                leading = at
        held.evict(capacity_tokens, self._share)
        return leading

    def forget(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """These blocks were stored for a prompt that was never computed."""
        held = self._held[worker_id]
        for block in hashes:
            held.tokens -= held.blocks.pop(block, 0) & _TOKENS

    def credit(self, worker_id: WorkerId, hashes: Sequence[BlockHash], end_tokens: int) -> None:
        """Note that the cache continues behind the last of ``hashes`` up to ``end_tokens``."""
        blocks = self._held[worker_id].blocks
        if hashes and hashes[-1] in blocks:
            tokens = blocks[hashes[-1]] & _TOKENS
            blocks[hashes[-1]] = (end_tokens << _TOKENS_BITS) | tokens

    @property
    def _share(self) -> int:
        return self._max_blocks // len(self._held)
