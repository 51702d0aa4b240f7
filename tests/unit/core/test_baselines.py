"""Each baseline on placements worked by hand from its published formula."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest

from gateway.core.baselines import BASELINES, cache_aware, dynamo, llm_d, random, sticky
from gateway.core.blocks import EMPTY_CHAIN
from gateway.core.cost import GPU_SPEED, DecodeEstimate, Estimates, PrefillFit
from gateway.core.placement import Candidate, Fleet, Policy
from gateway.core.reservation import Reservation, WorkerId
from gateway.core.worker import Engine, Worker

SPEEDS = Estimates(
    PrefillFit(GPU_SPEED.prefill), DecodeEstimate(GPU_SPEED.decode_seconds_per_token)
)
PROMPT_TOKENS = 1000


def candidate(
    name: str, cached: int = 0, waiting: Sequence[int] = (), decoding: Sequence[int] = ()
) -> Candidate:
    """A worker that holds ``cached`` of 1,000 prompt tokens, with requests of so many tokens each;
    a token takes a millisecond."""
    worker = Worker(WorkerId(name), SPEEDS, Engine(1, 10_000))
    for tokens in (*decoding, *waiting):
        held = Reservation(
            worker.id, 0, EMPTY_CHAIN, 0, tokens, tokens / 1e3, 0.0, stream=True, admitted_at=0.0
        )
        worker.reserve(held, 0.0)
        if len(worker._waiting) <= len(decoding) and worker.in_flight <= len(decoding):
            worker.prefilled(held, 0.0)
    uncached = PROMPT_TOKENS - cached
    return Candidate(worker, cached, uncached, uncached / 1e3, worker.pending_seconds(0.0))


def chosen(policy: Policy, *candidates: Candidate, turn: int = 0) -> str:
    return policy(candidates, Fleet(0.0, turn, 10.0, 1.0, now=0.0)).worker.id


def many(count: int) -> list[int]:
    return [1] * count


# --- vllm-router and sglang-router: r = matched / length; r > 0.3: the holder, else argmin load


def test_cache_aware_takes_a_match_of_more_than_a_threshold() -> None:
    idle = candidate("idle")
    assert chosen(cache_aware, idle, candidate("holder", 301, many(60))) == "holder"
    assert chosen(cache_aware, idle, candidate("holder", 300)) == "idle"
    assert chosen(cache_aware, candidate("a", 400), candidate("b", 500)) == "b"


def test_cache_aware_counts_requests_where_nothing_much_matches() -> None:
    two, one = candidate("two", 200, many(2)), candidate("one", 0, [5000])
    assert chosen(cache_aware, two, one) == "one"


def test_cache_aware_forgets_the_cache_where_load_is_uneven_by_both_measures() -> None:
    # max - min > 64 and max > 1.5 * min
    for busy, idle, expected in ((64, 0, "holder"), (65, 0, "other"), (195, 130, "holder"),
                                 (196, 130, "other"), (200, 140, "holder")):  # fmt: skip
        pair = candidate("holder", 900, many(busy)), candidate("other", 0, many(idle))
        assert chosen(cache_aware, *pair) == expected, (busy, idle)


# --- llm-d: 3 * matched share + 2 * (maxQ - q) / (maxQ - minQ) + 2 * (1 - usage)


def test_llm_d_adds_weighted_scores() -> None:
    # holder 3*0.8 + 2*0 + 2*0.9 = 4.2; other 0 + 2*1 + 2*1 = 4.0
    holder = candidate("holder", 800, [1000])
    assert chosen(llm_d, candidate("other"), holder) == "holder"
    # holder 3*0.7 + 0 + 1.8 = 3.9
    assert chosen(llm_d, candidate("other"), candidate("holder", 700, [1000])) == "other"
    # Equal queues count 1 for all: 3*0.1 + 2 + 2*0.9 = 4.1 against 0 + 2 + 2*0.9 = 3.8
    pair = candidate("other", 0, [1000]), candidate("holder", 100, [1000])
    assert chosen(llm_d, *pair) == "holder"


def test_llm_d_looks_at_how_full_caches_are() -> None:
    # holder 3*0.5 + 2 + 2*0.2 = 3.9; other 0 + 2 + 2 = 4
    assert chosen(llm_d, candidate("other"), candidate("holder", 500, (), [8000])) == "other"
    assert chosen(llm_d, candidate("other"), candidate("holder", 500, (), [7000])) == "holder"


# --- Dynamo: waiting prefill + prompt - match + what running requests hold, argmin


def test_dynamo_adds_prefill_and_decode_load() -> None:
    # holder: 0 + 1000 - 600 + 500 + 1000 = 1900; other: 0 + 1000 + 0 + 1000 = 2000
    assert chosen(dynamo, candidate("other"), candidate("holder", 600, (), [500])) == "holder"
    # 2000 - 600 + 700 = 2100
    assert chosen(dynamo, candidate("other"), candidate("holder", 600, (), [700])) == "other"


def test_dynamo_counts_a_waiting_prompt_as_prefill_and_as_held() -> None:
    # holder: 250 + 1000 - 600 + 250 + 1000 = 1900 against 2000; with 350 waiting 2100
    assert chosen(dynamo, candidate("other"), candidate("holder", 600, [250])) == "holder"
    assert chosen(dynamo, candidate("other"), candidate("holder", 600, [350])) == "other"


# --- the study's map: the longest match, else the least estimated prefill work


def test_sticky_stays_however_short_the_match_and_long_the_queue() -> None:
    assert chosen(sticky, candidate("idle"), candidate("holder", 1, [9000] * 50)) == "holder"
    assert chosen(sticky, candidate("a", 300), candidate("b", 200)) == "a"


def test_sticky_places_the_unseen_by_prefill_work() -> None:
    work = candidate("work", 0, [3000]), candidate("requests", 0, [400] * 5)
    assert chosen(sticky, *work) == "requests"
    assert chosen(sticky, candidate("waits", 0, [10]), candidate("runs", 0, (), [99_999])) == "runs"


# --- random


def test_random_is_even_and_the_same_each_time() -> None:
    four = [candidate(name) for name in "abcd"]
    taken = [chosen(random, *four, turn=turn) for turn in range(4000)]
    assert taken == [chosen(random, *four, turn=turn) for turn in range(4000)]
    counts = Counter(taken)
    assert set(counts) == set("abcd") and all(900 < count < 1100 for count in counts.values())
    pairs = Counter(pairwise(taken))
    assert len(pairs) == 16 and all(180 < count < 320 for count in pairs.values())


@pytest.mark.parametrize("policy", sorted(BASELINES))
def test_a_baseline_takes_the_only_worker(policy: str) -> None:
    assert chosen(BASELINES[policy], candidate("only", 0, many(500)), turn=77) == "only"
