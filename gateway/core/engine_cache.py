"""What one worker's engine says that it holds, block by block, in our hashes.

The engine names a block by a hash of its own. Ours follows from the block's token ids and its
parent's hash, so an event is translated where its parent is known; where it is not (events were
missed, or something beside the tokens went into the block) the block and all that come behind it
are counted and not guessed.

The engine keeps copies of one block without telling them apart, and says once for each that it was
stored and once that it was removed: copies are counted. Of the engine's tiers the GPU's and the
CPU's count as cached: vLLM loads from the CPU what follows the leading blocks on the GPU, and
counts both as cached tokens. Other tiers are told apart and not counted on.

What grows with the cache are dicts of integers, into which the garbage collector does not look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from gateway.core.blocks import BlockHash, Chain, extend, extra_key, token_bytes, token_root

EngineHash = int
"""Lowest 64 bits of the engine's own hash, unsigned."""

GPU, CPU, OTHER = "gpu", "cpu", "other"
TIERS = (GPU, CPU, OTHER)


class BlocksStored(NamedTuple):
    """Blocks that follow each other behind ``parent`` (None: they begin a prompt). ``token_ids``
    is empty where only known blocks are named. ``opaque``: more than tokens, adapter and salt went
    into them."""

    hashes: Sequence[EngineHash]
    parent: EngineHash | None
    token_ids: Sequence[int]
    block_size: int
    tier: str = GPU
    lora: str | None = None
    salt: str | None = None
    opaque: bool = False

    def pieces(self, blocks: int) -> Iterator[BlocksStored]:
        """The same in events of so many blocks at most."""
        if len(self.hashes) <= blocks or len(self.token_ids) != len(self.hashes) * self.block_size:
            yield self
            return
        for start in range(0, len(self.hashes), blocks):
            end, size = start + blocks, self.block_size
            yield self._replace(
                hashes=self.hashes[start:end],
                parent=self.hashes[start - 1] if start else self.parent,
                token_ids=self.token_ids[start * size : end * size],
            )


class BlocksRemoved(NamedTuple):
    hashes: list[EngineHash]
    tier: str = GPU


class AllCleared(NamedTuple):
    """Nothing is held any more, in no tier."""


class OtherCache(NamedTuple):
    """Something happened in another of several caches that the engine has."""


Event = BlocksStored | BlocksRemoved | AllCleared | OtherCache


class EngineCache:
    """Owns the translation, bounded by ``max_blocks``; ``copies`` are the GPU's blocks in use."""

    def __init__(self, max_blocks: int = 0) -> None:
        self.max_blocks = max_blocks
        self.untranslated = 0
        self.clear()

    def clear(self) -> None:
        self._ours: dict[EngineHash, BlockHash] = {}
        self._tiers: dict[str, dict[BlockHash, int]] = {tier: {} for tier in TIERS}
        self.copies = 0

    def blocks(self, tier: str) -> int:
        """Different blocks that are held in a tier."""
        return len(self._tiers[tier])

    def holds_all(self, chain: Chain) -> bool:
        """The last block of the chain is there, and so are those before it."""
        return not chain.hashes or chain.hashes[-1] in self._tiers[GPU]

    def leading(
        self, hashes: Sequence[BlockHash], usable: int, expected: dict[BlockHash, int]
    ) -> int:
        """How many of the first ``usable`` blocks are cached when the engine comes to them: those
        on the GPU, behind them those on the CPU, behind them those of requests ahead."""
        gpu, cpu = self._tiers[GPU], self._tiers[CPU]
        found = _run(gpu.__contains__, hashes, 0, usable)
        if cpu:
            found = _run(cpu.__contains__, hashes, found, usable)
        if expected:
            found = _run(lambda h: h in expected or h in gpu, hashes, found, usable)
        return found

    def store(self, event: BlocksStored) -> None:
        ours, tier = self._ours, self._tiers[event.tier]
        new = 0
        for engine, block in zip(event.hashes, self._translated(event), strict=True):
            if block is None or (engine not in ours and len(ours) >= self.max_blocks):
                self.untranslated += 1
                continue
            ours[engine] = block
            tier[block] = tier.get(block, 0) + 1
            new += 1
        if event.tier == GPU:
            self.copies += new

    def remove(self, event: BlocksRemoved) -> None:
        ours, tier = self._ours, self._tiers[event.tier]
        for engine in event.hashes:
            block = ours.get(engine)
            copies = 0 if block is None else tier.get(block, 0)
            if block is None or not copies:
                continue
            if event.tier == GPU:
                self.copies -= 1
            if copies > 1:
                tier[block] = copies - 1
                continue
            del tier[block]
            if not any(block in each for each in self._tiers.values()):
                del ours[engine]

    def _translated(self, event: BlocksStored) -> Sequence[BlockHash | None]:
        hashes, size = event.hashes, event.block_size
        if not event.token_ids:
            return [self._ours.get(engine) for engine in hashes]
        parent: BlockHash | None = None
        if not event.opaque and len(event.token_ids) == size * len(hashes):
            if event.parent is None:
                parent = token_root(size, extra_key(event.lora, event.salt))
            else:
                parent = self._ours.get(event.parent)
        try:
            data = b"" if parent is None else token_bytes(event.token_ids)
        except OverflowError:  # no token's id
            parent = None
        return [None] * len(hashes) if parent is None else extend(parent, data, 4 * size)


def _run(
    holds: Callable[[BlockHash], bool], hashes: Sequence[BlockHash], start: int, end: int
) -> int:
    """The first block from ``start`` on that is not held; ``end`` if all are."""
    if start >= end or not holds(hashes[start]):
        return start
    return start + sum(1 for _ in takewhile(holds, islice(hashes, start, end)))
