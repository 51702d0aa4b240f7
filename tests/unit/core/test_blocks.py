from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.core.blocks import (
    BYTE_BLOCK_BYTES,
    BYTES_PER_TOKEN,
    EMPTY_CHAIN,
    Prompt,
    token_bytes,
)

# Few ids and few sizes, so that prompts often share a prefix and end at a block's edge.
IDS = st.lists(st.integers(0, 2), max_size=24)
SIZES = st.integers(1, 5)
EXTRAS = st.sampled_from((b"", b"\0", b"a", b"ab", bytes(4), bytes(8)))


def exact(ids: list[int], extra: bytes = b"") -> Prompt:
    return Prompt(token_bytes(ids), True, extra)


def equal_leading(a: tuple[object, ...], b: tuple[object, ...]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@given(IDS, IDS, SIZES, EXTRAS)
def test_blocks_are_equal_as_far_as_prefixes_are(
    a: list[int], b: list[int], size: int, extra: bytes
) -> None:
    first, second = exact(a, extra).chain(size), exact(b, extra).chain(size)
    shared_tokens = equal_leading(tuple(a), tuple(b))
    assert equal_leading(first.hashes, second.hashes) == shared_tokens // size
    assert not set(first.hashes[shared_tokens // size :]) & set(second.hashes)


@given(st.binary(max_size=20), st.binary(max_size=20), st.integers(0, 3))
def test_byte_blocks_are_equal_as_far_as_bytes_are(a: bytes, b: bytes, shared_blocks: int) -> None:
    start = b"x" * (shared_blocks * BYTE_BLOCK_BYTES)
    first = Prompt(start + a * 20, False).chain(16)
    second = Prompt(start + b * 20, False).chain(16)
    shared_bytes = equal_leading(tuple(start + a * 20), tuple(start + b * 20))
    assert equal_leading(first.hashes, second.hashes) == shared_bytes // BYTE_BLOCK_BYTES


@example([0, 0], 1, b"", bytes(4))
@given(st.lists(st.integers(0, 2), min_size=1, max_size=24), SIZES, EXTRAS, EXTRAS)
def test_extra_separates(ids: list[int], size: int, one: bytes, other: bytes) -> None:
    shared = set(exact(ids, one).chain(size).hashes) & set(exact(ids, other).chain(size).hashes)
    assert bool(shared) == (one == other and len(ids) >= size)


def test_tokens_and_bytes_of_the_same_data_are_apart() -> None:
    data = token_bytes(range(BYTE_BLOCK_BYTES // 4))
    as_tokens = Prompt(data, True).chain(BYTE_BLOCK_BYTES // 4)
    assert set(as_tokens.hashes).isdisjoint(Prompt(data, False).chain(16).hashes)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=24), SIZES)
def test_only_full_blocks_count_and_the_last_token_is_always_computed(
    ids: list[int], size: int
) -> None:
    chain = exact(ids).chain(size)
    assert chain.prompt_tokens == len(ids)
    assert chain.block_tokens == size
    assert len(chain.hashes) == len(ids) // size
    assert chain.usable_blocks == (len(ids) - 1) // size


@given(st.binary(max_size=2000))
def test_tokens_of_unread_text_are_estimated(data: bytes) -> None:
    prompt = Prompt(data, False)
    chain = prompt.chain(16)
    assert chain.prompt_tokens == prompt.prompt_tokens == (len(data) // BYTES_PER_TOKEN or 1)
    assert chain.block_tokens * BYTES_PER_TOKEN == BYTE_BLOCK_BYTES
    assert len(chain.hashes) == len(data) // BYTE_BLOCK_BYTES
    assert chain.usable_blocks * chain.block_tokens < chain.prompt_tokens


def test_an_empty_prompt_has_one_token_to_compute() -> None:
    for chain in (exact([]).chain(16), Prompt(b"", False).chain(16), EMPTY_CHAIN):
        assert (chain.hashes, chain.prompt_tokens, chain.usable_blocks) == ((), 1, 0)


def test_a_chain_is_computed_once_for_each_block_size() -> None:
    prompt = exact(list(range(64)))
    assert prompt.chain(16) is prompt.chain(16)
    assert prompt.chain(32) is not prompt.chain(16)
    assert prompt == exact(list(range(64))), "what was computed is no part of the value"


@pytest.mark.parametrize("seed", ["1", "4242"])
def test_hashes_are_the_same_in_every_process(seed: str) -> None:
    ids = list(range(1000, 1100))
    expected = exact(ids, b"salt").chain(16).hashes
    code = (
        "from gateway.core.blocks import Prompt, token_bytes\n"
        "print(*Prompt(token_bytes(range(1000, 1100)), True, b'salt').chain(16).hashes)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert tuple(map(int, found)) == expected


@pytest.mark.parametrize("ids", [[-1], [1 << 32], [1.5], ["a"], [None]])
def test_what_is_no_token_id_is_refused(ids: list[object]) -> None:
    with pytest.raises((OverflowError, TypeError)):
        token_bytes(ids)  # type: ignore[arg-type]
