"""An engine's cache as one would write it first: a list of copies, each with all of its tokens.

It tells what it does as vLLM does: one removal for each copy, hashes of its own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from gateway.core.blocks import Prompt, extra_key, token_bytes
from gateway.core.engine_cache import CPU, GPU, AllCleared, BlocksRemoved, BlocksStored, Event

Key = tuple[str | None, str | None, tuple[int, ...]]
"""Adapter, salt, and all tokens up to the end of the block."""


def prompt_of(tokens: tuple[int, ...], lora: str | None, salt: str | None) -> Prompt:
    return Prompt(token_bytes(tokens), True, extra_key(lora, salt))


def own_hash(key: Key) -> int:
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[-8:], "big")


@dataclass
class NaiveEngine:
    block_size: int
    copies: list[tuple[str, Key]] = field(default_factory=list)  # (tier, block), oldest first

    def blocks(self, tier: str) -> set[Key]:
        return {key for where, key in self.copies if where == tier}

    def keys(self, tokens: tuple[int, ...], lora: str | None, salt: str | None) -> list[Key]:
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        return [(lora, salt, tokens[:end]) for end in ends]

    def compute(
        self, tokens: tuple[int, ...], lora: str | None, salt: str | None, again: int
    ) -> list[Event]:
        """Store what is not on the GPU, and of what is the last ``again`` blocks once more."""
        keys = self.keys(tokens, lora, salt)
        held = self.leading(tokens, lora, salt, tiers=(GPU,))
        start = max(0, held - again)
        if start == len(keys):
            return []
        self.copies += [(GPU, key) for key in keys[start:]]
        return [self.stored(GPU, keys[start:], tokens)]

    def stored(self, tier: str, keys: list[Key], tokens: tuple[int, ...]) -> BlocksStored:
        """Blocks of one prompt, in order."""
        size = self.block_size
        start, end = len(keys[0][2]) - size, len(keys[-1][2])
        lora, salt, before = keys[0][0], keys[0][1], tokens[:start]
        parent = own_hash((lora, salt, before)) if before else None
        told = tuple(own_hash(key) for key in keys)
        # The salt is told with the first block of a prompt only.
        seen = salt if parent is None else None
        return BlocksStored(told, parent, tokens[start:end], size, tier, lora, seen)

    def offload(self, number: int) -> list[Event]:
        """A block of the GPU goes to the CPU too, told by its name alone."""
        _, key = self.copies[number]
        self.copies.append((CPU, key))
        return [BlocksStored((own_hash(key),), None, (), 0, CPU)]

    def evict(self, number: int) -> list[Event]:
        tier, key = self.copies.pop(number)
        return [BlocksRemoved([own_hash(key)], tier)]

    def clear(self) -> list[Event]:
        self.copies.clear()
        return [AllCleared()]

    def leading(
        self,
        tokens: tuple[int, ...],
        lora: str | None,
        salt: str | None,
        tiers: tuple[str, ...] = (GPU, CPU),
    ) -> int:
        """Leading blocks held: those on the GPU, and behind them those on the CPU."""
        keys, found = self.keys(tokens, lora, salt), 0
        for tier in tiers:
            blocks = self.blocks(tier)
            while found < len(keys) and keys[found] in blocks:
                found += 1
        return found
