"""Chained block hashes: how a prompt is compared with what a worker has cached.

vLLM caches the key/value state of full blocks of ``block_size`` token ids, each keyed by its
parent block, its tokens and what else changes the state (LoRA adapter, cache salt). The chain here
has the same shape, so that "the first k hashes are held" means "the first k blocks are cached".
The hash has no seed of its own: it is equal in every process and after every restart.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from struct import iter_unpack
from typing import NewType, cast

from xxhash import xxh3_64_intdigest

BlockHash = NewType("BlockHash", int)

BYTE_BLOCK_BYTES = 512
"""Size of a block where token ids are unknown."""

BYTES_PER_TOKEN = 4
"""Estimate used where token ids are unknown; English text in common vocabularies is near it."""

_hash = cast(Callable[[bytes, int], BlockHash], xxh3_64_intdigest)


@dataclass(frozen=True, slots=True)
class Chain:
    """The block hashes of one prompt.

    ``hashes[i]`` stands for blocks 0 to i. ``usable_blocks`` is how many of them the engine can
    serve from its cache: it always computes the last prompt token, so at most
    ``(prompt_tokens - 1) // block_tokens``. ``exact``: made of token ids, as the engine's are.
    """

    hashes: tuple[BlockHash, ...]
    block_tokens: int
    prompt_tokens: int
    exact: bool = True

    @property
    def usable_blocks(self) -> int:
        return min(len(self.hashes), (self.prompt_tokens - 1) // self.block_tokens)


EMPTY_CHAIN = Chain((), 1, 1)


def extra_key(lora: str | None, salt: str | None) -> bytes:
    """What separates chains of equal tokens: the LoRA adapter's name and the cache salt; empty
    where there is neither. Requests and the engine's events must make it alike."""
    return b"" if lora is None and salt is None else json.dumps([lora, salt]).encode()


def token_bytes(token_ids: Iterable[int]) -> bytes:
    """Token ids as 4-byte unsigned integers; raises OverflowError or TypeError for non-ids."""
    return array("I", token_ids).tobytes()


@dataclass(frozen=True, slots=True)
class Prompt:
    """What routing knows of a prompt: exact token ids, else canonical bytes.

    ``data`` holds token ids as ``token_bytes`` makes them when ``exact``, else any bytes that are
    equal for equal prompts and share a prefix when prompts do. ``extra`` separates chains whose
    equal tokens have different cached state (LoRA adapter, cache salt).
    """

    data: bytes
    exact: bool
    extra: bytes = b""
    _chains: dict[int, Chain] = field(default_factory=dict, compare=False, repr=False)

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens, estimated where the prompt is not exact; at least 1."""
        return max(1, len(self.data) // (4 if self.exact else BYTES_PER_TOKEN))

    def chain(self, block_size: int) -> Chain:
        """The chain for an engine with ``block_size`` tokens per block; computed once for each."""
        found = self._chains.get(block_size)
        if found is None:
            found = self._chains[block_size] = self._hash(block_size)
        return found

    def _hash(self, block_size: int) -> Chain:
        if self.exact:
            hashes = extend(token_root(block_size, self.extra), self.data, 4 * block_size)
            return Chain(tuple(hashes), block_size, self.prompt_tokens)
        root = _root(BYTE_BLOCK_BYTES, b"bytes\0" + self.extra)
        hashes = extend(root, self.data, BYTE_BLOCK_BYTES)
        block_tokens = BYTE_BLOCK_BYTES // BYTES_PER_TOKEN
        return Chain(tuple(hashes), block_tokens, self.prompt_tokens, exact=False)


def token_root(block_size: int, extra: bytes) -> BlockHash:
    """What the first block of a chain of token ids has for a parent."""
    return _root(4 * block_size, b"tokens\0" + extra)


def extend(parent: BlockHash, data: bytes, step_bytes: int) -> list[BlockHash]:
    """``h_i = H(h_{i-1}, data_i)`` over the full steps of ``data``; a rest has no hash.

    XXH3 with the parent's hash as its seed: a quarter of the time of a cryptographic hash. Whoever
    finds two prompts of one hash misleads the placement of their own requests, and nothing else.
    """
    full = data[: len(data) - len(data) % step_bytes]
    return [parent := _hash(block, parent) for (block,) in iter_unpack(f"{step_bytes}s", full)]


def _root(step_bytes: int, kind: bytes) -> BlockHash:
    # Blocks of another size are other blocks, also where they end at the same byte.
    return _hash(b"%d %b" % (step_bytes, kind), 0)
