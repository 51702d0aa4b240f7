"""The router with and without its workers' events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.blocks import Chain, Prompt, token_bytes
from gateway.core.engine_cache import AllCleared, BlocksStored, OtherCache
from gateway.core.followed import Followed
from gateway.core.options import Options
from gateway.core.placement import POLICIES
from gateway.core.request import Request, Result, Usage
from gateway.core.reservation import Reservation, WorkerId
from gateway.core.router import Router
from gateway.core.worker import Engine, Loss
from tests.unit.core.naive_engine import NaiveEngine

A = WorkerId("a")
SIZE = 4
IDS = tuple(range(1, 42))  # ten blocks and a token
CHAIN: Chain = Prompt(token_bytes(IDS), True).chain(SIZE)


def router(capacity_blocks: int = 100) -> Router:
    made = Router(Options(policy=POLICIES["prefix_affinity"]))
    made.add_worker(A)
    made.set_ready(A, True)
    made.set_engine(A, Engine(SIZE, capacity_blocks))
    return made


def followed(made: Router) -> Followed:
    return made.caches.followed[A]


def admit(made: Router, ids: tuple[int, ...], exact: bool = True) -> Reservation:
    return made.admit(Request(Prompt(token_bytes(ids), exact)), 0.0)


def ended(ids: tuple[int, ...], cached: int = 0) -> Result:
    return Result(Usage(len(ids), 1, cached))


def compute(made: Router, engine: NaiveEngine, ids: tuple[int, ...]) -> None:
    """The engine computes a prompt and tells."""
    for event in engine.compute(ids, None, None, 0):
        made.caches.apply(A, event)
    followed(made).applied()


def both(held: Reservation) -> tuple[int, int | None]:
    return held.prediction


def test_without_events_the_estimate_stands() -> None:
    made = router()
    made.settle(admit(made, IDS), ended(IDS), 1.0)
    held = admit(made, IDS)
    assert (both(held), held.cached_tokens) == ((10, None), 40)


def test_with_events_the_engine_is_believed() -> None:
    made, engine = router(), NaiveEngine(SIZE)
    compute(made, engine, IDS[:20])
    held = admit(made, IDS)
    assert (both(held), held.cached_tokens, held.uncached_tokens) == ((0, 5), 20, 21)
    compute(made, engine, IDS)
    made.settle(held, ended(IDS, 20), 1.0)
    for number in reversed(range(8, 10)):
        for event in engine.evict(number):
            made.caches.apply(A, event)
    assert both(admit(made, IDS)) == (10, 8)


def test_equal_prompts_that_arrive_together_meet() -> None:
    made, engine = router(), NaiveEngine(SIZE)
    compute(made, engine, IDS[:8])
    first, second = admit(made, IDS), admit(made, IDS)
    assert (first.cached_tokens, second.cached_tokens) == (8, 40)
    made.settle(first, ended(IDS), 1.0)
    assert admit(made, IDS).cached_tokens == 40, "the second is still there"
    made.settle(second, ended(IDS), 1.0)


def test_what_was_refused_is_not_there() -> None:
    made, engine = router(), NaiveEngine(SIZE)
    compute(made, engine, IDS[:8])
    made.settle(admit(made, IDS), Result(computed=False), 1.0)
    assert both(admit(made, IDS)) == (0, 2)
    assert followed(made).expected.blocks


def test_nothing_is_expected_when_all_have_ended() -> None:
    made, engine = router(), NaiveEngine(SIZE)
    compute(made, engine, IDS[:8])
    held = [admit(made, IDS[: 41 - 4 * n]) for n in range(4)]
    for each in held:
        made.settle(each, ended(IDS), 1.0)
    for _ in range(2):
        followed(made).applied()
    assert followed(made).expected.blocks == {}


def test_an_answer_that_is_here_before_its_event_is_expected_on() -> None:
    made, engine = router(), NaiveEngine(SIZE)
    compute(made, engine, IDS[:8])
    made.settle(admit(made, IDS), ended(IDS), 1.0)
    assert admit(made, IDS).cached_tokens == 40
    followed(made).applied()  # a batch that was on its way before
    assert admit(made, IDS).cached_tokens == 40


def test_what_is_under_way_is_computed_though_the_cache_was_cleared() -> None:
    """The engine tells of it late: requests have been placed by what it held before."""
    made, engine = router(), NaiveEngine(SIZE)
    compute(made, engine, IDS)
    first = admit(made, IDS)
    assert first.cached_tokens == 40
    for event in engine.clear():
        made.caches.apply(A, event)
    followed(made).applied()
    second = admit(made, IDS)
    assert (both(second), second.cached_tokens) == ((10, 10), 40)
    for held in (first, second):
        made.settle(held, Result(computed=False), 1.0)
    assert followed(made).expected.blocks == {}
    assert admit(made, IDS).prediction.told == 0


def test_prompts_read_as_bytes_keep_the_estimate() -> None:
    made, engine = router(), NaiveEngine(SIZE)
    compute(made, engine, IDS)
    text = tuple(range(1000))
    made.settle(admit(made, text, exact=False), ended(text), 1.0)
    held = admit(made, text, exact=False)
    assert held.prediction.told is None and held.cached_tokens > 0


def test_a_loss_falls_back_to_the_estimate_at_once() -> None:
    made, engine = router(), NaiveEngine(SIZE)
    held = admit(made, IDS)
    compute(made, engine, IDS)
    made.settle(held, ended(IDS), 1.0)
    followed(made).lost()
    assert both(admit(made, IDS)) == (10, None)
    assert followed(made).resets == 1
    made.caches.apply(A, AllCleared())
    followed(made).applied()
    assert followed(made).trusted
    assert both(admit(made, IDS)) == (10, 10), "the first is still on its way"


def test_after_a_loss_it_is_whole_when_nearly_all_blocks_are_known() -> None:
    made, engine = router(capacity_blocks=10), NaiveEngine(SIZE)
    compute(made, engine, (7,) * SIZE)
    followed(made).lost()
    compute(made, engine, IDS[:32])
    assert not followed(made).trusted
    compute(made, engine, IDS[:36])
    assert followed(made).trusted


def test_more_blocks_than_there_are_cannot_be() -> None:
    made, engine = router(capacity_blocks=10), NaiveEngine(SIZE)
    compute(made, engine, IDS)
    assert followed(made).trusted
    compute(made, engine, (9,) * SIZE)
    assert (followed(made).trusted, followed(made).resets) == (False, 1)


def test_a_clear_empties_the_estimate_too() -> None:
    made = router()
    made.settle(admit(made, IDS), ended(IDS), 1.0)
    made.caches.apply(A, AllCleared())
    assert made.index.blocks(A) == 0


def test_a_new_generation_is_empty_and_followed_on() -> None:
    made, engine = router(), NaiveEngine(SIZE)
    compute(made, engine, IDS)
    held = admit(made, IDS)
    made.new_generation(A, Loss.SLEPT)
    assert both(admit(made, IDS)) == (0, 0)
    made.settle(held, ended(IDS), 1.0)
    assert len(followed(made).expected.blocks) == 10


def test_answers_without_any_event_end_the_trust_until_one_comes() -> None:
    made, engine = router(), NaiveEngine(SIZE)
    compute(made, engine, IDS)
    for seed in range(3):
        assert followed(made).trusted
        ids = tuple(range(100 * seed + 100, 100 * seed + 130))
        made.settle(admit(made, ids), ended(ids), 1.0)
    assert not followed(made).trusted
    compute(made, engine, IDS + IDS)
    assert followed(made).trusted


def test_answers_from_the_cache_are_no_silence() -> None:
    made, engine = router(), NaiveEngine(SIZE)
    compute(made, engine, IDS)
    for _ in range(9):
        made.settle(admit(made, IDS), ended(IDS, 40), 1.0)
    assert followed(made).trusted


def test_an_engine_of_several_caches_is_estimated() -> None:
    made, engine = router(), NaiveEngine(SIZE)
    compute(made, engine, IDS)
    made.caches.apply(A, OtherCache())
    assert admit(made, IDS).prediction.told is None


def test_the_end_of_following_is_the_end_of_trust() -> None:
    made, engine = router(), NaiveEngine(SIZE)
    compute(made, engine, IDS)
    followed(made).ended()
    held = admit(made, IDS)
    assert (held.prediction.told, held.expected) == (None, None)


def test_the_bound_is_shared_by_the_workers() -> None:
    made = Router(Options(policy=POLICIES["prefix_affinity"], max_index_blocks=8))
    for name in "ab":
        made.add_worker(WorkerId(name))
    event = BlocksStored(tuple(range(10)), None, IDS[:40], SIZE)
    made.caches.apply(A, event)
    assert followed(made).cache.blocks("gpu") == 4


def test_generated_tokens_are_the_engines_word() -> None:
    made, engine = router(), NaiveEngine(SIZE)
    compute(made, engine, IDS[:9])
    compute(made, engine, IDS[:20])
    assert made.caches.predict(made.workers[A], CHAIN) == (0, 5)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("admit"), st.integers(1, 41)),
            st.tuples(st.just("compute"), st.integers(1, 41)),
            st.tuples(st.sampled_from(("settle", "refuse")), st.integers(0, 5)),
            st.tuples(st.sampled_from(("lost", "cleared", "evict", "slept")), st.just(0)),
        ),
        max_size=30,
    )
)
def test_told_is_what_is_held_and_what_is_on_its_way(steps: list[tuple[str, int]]) -> None:
    """Of blocks that were held when a request was placed, and are gone before it runs, nothing is
    expected: those alone may be missed."""
    made, engine = router(), NaiveEngine(SIZE)
    live: list[tuple[Reservation, int]] = []
    gone = False
    compute(made, engine, (9,) * SIZE)
    for step, number in steps:
        if step == "admit":
            live.append((admit(made, IDS[:number]), number))
        elif step == "compute":
            compute(made, engine, IDS[:number])
        elif step in ("settle", "refuse") and live:
            held, _ = live.pop(number % len(live))
            made.settle(held, Result(computed=step == "settle"), 1.0)
        elif step == "lost":
            followed(made).lost()
        elif step in ("cleared", "slept"):
            for event in engine.clear():
                made.caches.apply(A, event)
            if step == "slept":
                made.new_generation(A, Loss.SLEPT)
        elif step == "evict" and engine.copies:
            for event in engine.evict(len(engine.copies) - 1):
                made.caches.apply(A, event)
        told = made.caches.predict(made.workers[A], CHAIN).told
        if followed(made).partial:
            assert told is None
            gone = bool(live)
            continue
        current = made.workers[A].generation
        ahead = [length // SIZE for held, length in live if held.generation == current]
        known = followed(made).cache.leading(CHAIN.hashes, 10, {})
        assert told is not None and known <= told <= max([known, *ahead])
        gone |= step in ("lost", "evict") and bool(live)
        gone &= bool(live)
        assert gone or told == max([known, *ahead])
    for held, _ in live:
        made.settle(held, Result(), 1.0)
    assert followed(made).expected.blocks == {}


def test_a_new_generation_meanwhile_leaves_nothing_expected() -> None:
    """Its cache was found empty by what was delivered: the engine is followed on all the same."""
    made, engine = router(), NaiveEngine(SIZE)
    compute(made, engine, IDS[:8])
    held = admit(made, IDS)
    made.workers[A].new_generation(Loss.OVER_PREDICTED)
    made.settle(held, Result(computed=False), 1.0)
    assert followed(made).expected.blocks == {}
