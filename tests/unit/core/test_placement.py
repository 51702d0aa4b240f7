from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.cost import GPU_SPEED, DecodeEstimate, Estimates, PrefillFit
from gateway.core.placement import (
    POLICIES,
    Candidate,
    Fleet,
    least_work,
    prefix_affinity,
    round_robin,
)
from gateway.core.reservation import WorkerId
from gateway.core.worker import Worker

SPEEDS = Estimates(
    PrefillFit(GPU_SPEED.prefill), DecodeEstimate(GPU_SPEED.decode_seconds_per_token)
)


def fleet(
    waiting_mean: float = 0.0, turn: int = 0, social_weight: float = 10.0, whole: float = 1.0
) -> Fleet:
    return Fleet(waiting_mean, turn, social_weight, whole, now=0.0)


IDLE = fleet()


def candidate(
    name: str = "w",
    pending: float = 0.0,
    prefill: float = 1.0,
    recent: float = 0.0,
    in_flight: int = 0,
) -> Candidate:
    worker = Worker(WorkerId(name), SPEEDS)
    worker.in_flight = in_flight
    worker._recent = recent
    return Candidate(worker, 0, 1000, prefill, pending)


SECONDS = st.floats(0, 100)
CANDIDATES = st.lists(st.builds(candidate, st.just("w"), SECONDS, SECONDS, SECONDS), min_size=1)
FLEETS = st.builds(fleet, SECONDS, st.integers(0, 10**9), SECONDS, st.floats(0, 10))


def test_idle_the_soonest_first_token_wins() -> None:
    cached = candidate("cached", pending=0.5, prefill=0.1)
    idle = candidate("idle", prefill=1.0)
    assert prefix_affinity([cached, idle], IDLE) is cached
    busier = candidate("cached", pending=1.5, prefill=0.1)
    assert prefix_affinity([busier, idle], IDLE) is idle


def test_loaded_a_recomputed_prefix_is_charged_for_all_whom_it_delays() -> None:
    cached = candidate("cached", pending=1.5, prefill=0.1)
    idle = candidate("idle", prefill=1.0)
    assert prefix_affinity([cached, idle], fleet(1.0)) is cached
    assert prefix_affinity([cached, idle], fleet(1.0, 0, 0.0)) is idle


def test_a_hot_prefix_spills_exactly_when_that_is_cheaper() -> None:
    idle = candidate("idle", prefill=1.0)
    for queued, spills in ((0.85, False), (0.89, False), (0.91, True), (5.0, True)):
        hot = candidate("hot", pending=queued, prefill=0.1)
        assert (prefix_affinity([hot, idle], fleet(whole=1e-6)) is idle) == spills


def test_least_work_does_not_look_at_the_cache() -> None:
    cached = candidate("cached", pending=0.5, prefill=0.0)
    idle = candidate("idle", pending=0.2, prefill=1.0)
    assert least_work([cached, idle], IDLE) is idle


def test_round_robin_takes_each_in_turn() -> None:
    three = [candidate(name) for name in "abc"]
    taken = [round_robin(three, fleet(9.0, turn)).worker.id for turn in range(6)]
    assert taken == ["a", "b", "c"] * 2


def test_like_costs_are_a_tie_that_the_least_recently_charged_wins() -> None:
    charged = candidate("charged", prefill=1.0, recent=3.0)
    other = candidate("other", prefill=1.02, recent=1.0)
    assert prefix_affinity([charged, other], IDLE) is other
    assert prefix_affinity([charged, candidate("dear", prefill=1.04)], IDLE) is charged
    busy = candidate("busy", in_flight=2)
    assert least_work([busy, candidate("free", in_flight=1)], IDLE).worker.id == "free"


@given(CANDIDATES, FLEETS, st.sampled_from(sorted(POLICIES)))
def test_every_policy_chooses_one_of_the_candidates(
    candidates: list[Candidate], seen: Fleet, policy: str
) -> None:
    assert POLICIES[policy](candidates, seen) in candidates


@given(CANDIDATES, FLEETS)
def test_the_choice_costs_the_least_but_for_a_tie(candidates: list[Candidate], seen: Fleet) -> None:
    def cost(c: Candidate) -> float:
        delays = seen.social_weight * (seen.waiting_mean + 0.5) if seen.waiting_mean else 0.0
        return c.pending_seconds + (1 + delays) * c.prefill_seconds

    chosen = prefix_affinity(candidates, seen)
    tie = 0.03 * seen.whole_prefill_seconds
    assert cost(chosen) <= min(map(cost, candidates)) + tie + 1e-9 * cost(chosen)
    rivals = [c for c in candidates if cost(c) < min(map(cost, candidates)) + tie * 0.999]
    assert all(chosen.worker._recent <= c.worker._recent for c in rivals)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_one_worker_takes_everything(policy: str) -> None:
    only = candidate(pending=1e6)
    assert POLICIES[policy]([only], fleet(50.0, 12345)) is only
