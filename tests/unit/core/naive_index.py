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
    """Blocks of one worker, the least recently used first, the last touch of each, and the credits
    behind some: up to which token an answer goes on, and how many of its tokens take room."""

    held: list[Key] = field(default_factory=list)
    touched: dict[Key, int] = field(default_factory=dict)
    credits: dict[Key, tuple[int, int]] = field(default_factory=dict)
    touches: int = 0

    def match(self, prompt: Prompt, block_size: int) -> int:
        wanted = keys(prompt, block_size)
        tokens = block_tokens(prompt, block_size)
        usable = sum((i + 1) * tokens < prompt.prompt_tokens for i in range(len(wanted)))
        matched = 0
        while matched < usable:
            if wanted[matched] not in self.held:
                behind, _ = self.credits.get(wanted[matched - 1], (0, 0)) if matched else (0, 0)
                return max(matched, min(behind // tokens, usable))
            matched += 1
        return matched

    def store(
        self, prompt: Prompt, block_size: int, capacity_tokens: int, capacity_blocks: int
    ) -> tuple[int, list[Key]]:
        """The number of this touch, and the keys that were not held before."""
        added = self._touch(prompt, block_size)
        self._evict(capacity_tokens, capacity_blocks)
        return self.touches, added

    def answered(
        self, prompt: Prompt, block_size: int, capacity: tuple[int, int], end_tokens: int
    ) -> None:
        wanted = keys(prompt, block_size)
        if not wanted:
            return
        self._touch(prompt, block_size)
        blocks_end = len(wanted) * block_tokens(prompt, block_size)
        if end_tokens > blocks_end:
            self.credits[wanted[-1]] = (end_tokens, end_tokens - blocks_end)
        self._evict(*capacity)

    def forget(self, touch: int, added: list[Key]) -> None:
        gone = [key for key in added if self.touched[key] == touch]
        self._keep([key for key in self.held if key not in gone])

    def drop(self) -> None:
        self._keep([])

    def drop_before(self, touch: int) -> None:
        self._keep([key for key in self.held if self.touched[key] >= touch])

    def _touch(self, prompt: Prompt, block_size: int) -> list[Key]:
        wanted = keys(prompt, block_size)
        added = [key for key in wanted if key not in self.held]
        if added and len(added) < len(wanted):
            last = wanted[len(wanted) - len(added) - 1]
            if last in self.credits:
                self.credits[last] = (self.credits[last][0], 0)
        self.held = [key for key in self.held if key not in wanted] + wanted[::-1]
        self.touches += 1
        self.touched.update(dict.fromkeys(wanted, self.touches))
        return added

    def _evict(self, capacity_tokens: int, capacity_blocks: int) -> None:
        while self._tokens() > capacity_tokens or len(self.held) > capacity_blocks:
            self._keep(self.held[1:])

    def _tokens(self) -> int:
        return sum(map(tokens_of, self.held)) + sum(room for _, room in self.credits.values())

    def _keep(self, held: list[Key]) -> None:
        self.held = held
        self.credits = {key: end for key, end in self.credits.items() if key in held}
