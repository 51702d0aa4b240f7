from __future__ import annotations

import gc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.core.blocks import Chain, Prompt, extra_key, token_bytes
from gateway.core.engine_cache import (
    CPU,
    GPU,
    OTHER,
    BlocksRemoved,
    BlocksStored,
    EngineCache,
)
from tests.unit.core.naive_engine import NaiveEngine, prompt_of

SIZE = 4
IDS = tuple(range(1, 21))


def chain(tokens: tuple[int, ...], extra: bytes = b"") -> Chain:
    return Prompt(token_bytes(tokens), True, extra).chain(SIZE)


def leading(cache: EngineCache, of: Chain) -> int:
    return cache.leading(of.hashes, len(of.hashes), {})


def stored(tokens: tuple[int, ...], first: int = 100, parent: int | None = None) -> BlocksStored:
    return BlocksStored(tuple(range(first, first + len(tokens) // SIZE)), parent, tokens, SIZE)


def test_what_the_engine_stores_is_found_by_the_prompts_tokens() -> None:
    cache = EngineCache(100)
    cache.store(stored(IDS[:12]))
    assert leading(cache, chain(IDS)) == 3
    cache.store(stored(IDS[12:20], 103, 102))
    assert leading(cache, chain(IDS)) == 5
    assert leading(cache, chain((9, *IDS[1:]))) == 0


@pytest.mark.parametrize(("lora", "salt"), [("sql", None), (None, "me"), ("sql", "me")])
def test_adapter_and_salt_are_other_chains(lora: str | None, salt: str | None) -> None:
    cache = EngineCache(100)
    cache.store(stored(IDS)._replace(lora=lora, salt=salt))
    assert leading(cache, chain(IDS)) == 0
    assert leading(cache, chain(IDS, extra_key(lora, salt))) == 5


def test_each_copy_is_removed_for_itself() -> None:
    cache = EngineCache(100)
    cache.store(stored(IDS))
    cache.store(stored(IDS[16:], 104, 103))
    assert (cache.copies, cache.blocks(GPU)) == (6, 5)
    cache.remove(BlocksRemoved([104]))
    assert leading(cache, chain(IDS)) == 5
    cache.remove(BlocksRemoved([104]))
    assert leading(cache, chain(IDS)) == 4
    cache.remove(BlocksRemoved([104, 104]))
    assert (cache.copies, cache.blocks(GPU)) == (4, 4)


def test_blocks_behind_an_unknown_parent_are_counted_and_not_guessed() -> None:
    cache = EngineCache(100)
    cache.store(stored(IDS[8:], 102, 101))
    assert (cache.untranslated, cache.blocks(GPU)) == (3, 0)
    cache.store(stored(IDS[:8], 100))
    assert leading(cache, chain(IDS)) == 2
    cache.remove(BlocksRemoved([102, 103]))  # never known: nothing to take back
    assert cache.copies == 2


@pytest.mark.parametrize(
    "event",
    [
        stored(IDS)._replace(opaque=True),
        stored(IDS)._replace(token_ids=IDS[:-1]),  # as where blocks were left out
        stored(IDS)._replace(block_size=0),
        stored((-1, *IDS[1:])),
        stored((2**40, *IDS[1:])),
        stored(IDS)._replace(token_ids=(), block_size=0),
    ],
)
def test_what_cannot_be_translated_is_counted(event: BlocksStored) -> None:
    cache = EngineCache(100)
    cache.store(event)
    assert (cache.untranslated, cache.copies) == (5, 0)


def test_the_cpu_serves_what_follows_the_gpu() -> None:
    cache = EngineCache(100)
    cache.store(stored(IDS))
    cache.store(BlocksStored((102, 103, 104), None, (), 0, CPU))
    cache.remove(BlocksRemoved([103, 104]))
    assert [cache.blocks(tier) for tier in (GPU, CPU, OTHER)] == [3, 3, 0]
    assert leading(cache, chain(IDS)) == 5
    cache.remove(BlocksRemoved([102, 101]))
    assert leading(cache, chain(IDS)) == 1, "the engine cannot jump over a block"


def test_other_tiers_are_told_apart_and_not_counted_on() -> None:
    cache = EngineCache(100)
    cache.store(stored(IDS)._replace(tier=OTHER))
    assert (cache.blocks(OTHER), leading(cache, chain(IDS))) == (5, 0)


def test_expected_blocks_follow_known_ones() -> None:
    cache, of = EngineCache(100), chain(IDS)
    cache.store(stored(IDS[:8]))
    assert cache.leading(of.hashes, 5, {of.hashes[2]: 1}) == 3
    assert cache.leading(of.hashes, 2, {of.hashes[2]: 1}) == 2
    assert cache.leading(of.hashes, 5, {of.hashes[3]: 1}) == 2


def test_it_is_bounded() -> None:
    cache = EngineCache(3)
    cache.store(stored(IDS))
    assert (cache.blocks(GPU), cache.untranslated) == (3, 2)
    cache.remove(BlocksRemoved([102]))
    cache.store(stored(IDS[8:12], 102, 101))
    assert leading(cache, chain(IDS)) == 3


def test_a_large_event_in_pieces_is_the_same_event() -> None:
    whole, pieced = EngineCache(1000), EngineCache(1000)
    event = stored(tuple(range(400)))._replace(salt="s")
    whole.store(event)
    pieces = list(event.pieces(7))
    assert max(len(piece.hashes) for piece in pieces) == 7
    for piece in pieces:
        pieced.store(piece)
    of = chain(tuple(range(400)), extra_key(None, "s"))
    assert leading(whole, of) == leading(pieced, of) == 100
    odd = event._replace(token_ids=event.token_ids[:-1])
    assert list(odd.pieces(7)) == [odd]


def test_the_collector_does_not_look_into_it() -> None:
    cache = EngineCache(100_000)
    before = len(gc.get_objects())
    cache.store(stored(tuple(range(40_000))))
    assert cache.blocks(GPU) == 10_000
    assert len(gc.get_objects()) - before < 100


# --- beside an engine that keeps a list

TOKENS = st.builds(
    lambda length, tail: (0,) * length + tuple(tail),
    st.integers(0, 9),
    st.lists(st.integers(0, 1), max_size=4),
)
LORAS, SALTS = st.sampled_from((None, "l")), st.sampled_from((None, "s"))


class FollowingMachine(RuleBasedStateMachine):
    @initialize(size=st.integers(1, 3))
    def start(self, size: int) -> None:
        self.engine = NaiveEngine(size)
        self.cache = EngineCache(10_000)

    def tell(self, events: list) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                self.cache.store(event)
            elif isinstance(event, BlocksRemoved):
                self.cache.remove(event)
            else:
                self.cache.clear()

    @rule(tokens=TOKENS, lora=LORAS, salt=SALTS, again=st.integers(0, 2))
    def compute(
        self, tokens: tuple[int, ...], lora: str | None, salt: str | None, again: int
    ) -> None:
        self.tell(self.engine.compute(tokens, lora, salt, again))

    @precondition(lambda self: self.engine.copies)
    @rule(data=st.data())
    def offload(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.engine.copies) - 1))
        if self.engine.copies[number][0] == GPU:
            self.tell(self.engine.offload(number))

    @precondition(lambda self: self.engine.copies)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """The last copy of a block that others stand on stays: so it is with the engine."""
        number = data.draw(st.integers(0, len(self.engine.copies) - 1))
        _, (lora, salt, tokens) = self.engine.copies[number]
        longer = [
            key
            for _, key in self.engine.copies
            if key[:2] == (lora, salt)
            and len(key[2]) > len(tokens) == len(key[2]) - self.engine.block_size
            and key[2][: len(tokens)] == tokens
        ]
        if not longer or self.engine.copies.count(self.engine.copies[number]) > 1:
            self.tell(self.engine.evict(number))

    @rule()
    def clear(self) -> None:
        self.tell(self.engine.clear())

    @rule(tokens=TOKENS, lora=LORAS, salt=SALTS)
    def match(self, tokens: tuple[int, ...], lora: str | None, salt: str | None) -> None:
        of = prompt_of(tokens, lora, salt).chain(self.engine.block_size)
        assert leading(self.cache, of) == self.engine.leading(tokens, lora, salt)

    @invariant()
    def counts_are_those_of_the_engine(self) -> None:
        if not hasattr(self, "engine"):
            return
        on_gpu = [key for tier, key in self.engine.copies if tier == GPU]
        assert self.cache.copies == len(on_gpu)
        assert self.cache.blocks(GPU) == len(set(on_gpu))
        assert self.cache.blocks(CPU) == len(self.engine.blocks(CPU))
        assert self.cache.untranslated == 0


TestFollowing = FollowingMachine.TestCase
TestFollowing.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
