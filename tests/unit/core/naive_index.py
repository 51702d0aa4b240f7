"""A prefix index as one would write it first: lists and searches, nothing kept in step.

Blocks are keyed by their size and all that comes before their end, not by a hash.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.core.blocks import BYTE_BLOCK_BYTES, BYTES_PER_TOKEN, Prompt

Key = tuple[bool, int, bytes, bytes]


def block_tokens(prompt: Prompt, block_size: int) -> int:
    return block_size if prompt.exact else BYTE_BLOCK_BYTES // BYTES_PER_TOKEN


def keys(prompt: Prompt, block_size: int) -> list[Key]:
    """One key for each full block."""
    step = 4 * block_size if prompt.exact else BYTE_BLOCK_BYTES
    ends = range(step, len(prompt.data) + 1, step)
    return [(prompt.exact, step, prompt.extra, prompt.data[:end]) for end in ends]


def tokens_of(key: Key) -> int:
    exact, step_bytes, _, _ = key
    return step_bytes // (4 if exact else BYTES_PER_TOKEN)


@dataclass
class NaiveLru:
    """Blocks of one worker, the least recently used first, the last store that touched each, and
    the credits behind some."""

    held: list[Key] = field(default_factory=list)
    touched: dict[Key, int] = field(default_factory=dict)
    credits: dict[Key, int] = field(default_factory=dict)
    stores: int = 0

    def match(self, prompt: Prompt, block_size: int) -> int:
        wanted = keys(prompt, block_size)
        tokens = block_tokens(prompt, block_size)
        usable = sum((i + 1) * tokens < prompt.prompt_tokens for i in range(len(wanted)))
        matched = 0
        while matched < usable:
            if wanted[matched] not in self.held:
                behind = self.credits.get(wanted[matched - 1], 0) if matched else 0
                return max(matched, min(behind // tokens, usable))
            matched += 1
        return matched

    def store(
        self, prompt: Prompt, block_size: int, capacity_tokens: int, capacity_blocks: int
    ) -> tuple[int, list[Key]]:
        """The number of this store, and the keys that were not held before."""
        wanted = keys(prompt, block_size)
        added = [key for key in wanted if key not in self.held]
        held = [key for key in self.held if key not in wanted] + wanted[::-1]
        while sum(map(tokens_of, held)) > capacity_tokens or len(held) > capacity_blocks:
            held = held[1:]
        self.stores += 1
        self.touched.update(dict.fromkeys(wanted, self.stores))
        self._keep(held)
        return self.stores, added

    def forget(self, store: int, added: list[Key]) -> None:
        gone = [key for key in added if self.touched[key] == store]
        self._keep([key for key in self.held if key not in gone])

    def credit(self, prompt: Prompt, block_size: int, end_tokens: int) -> None:
        wanted = keys(prompt, block_size)
        if wanted and wanted[-1] in self.held:
            self.credits[wanted[-1]] = end_tokens

    def drop(self) -> None:
        self._keep([])

    def _keep(self, held: list[Key]) -> None:
        self.held = held
        self.credits = {key: end for key, end in self.credits.items() if key in held}
