from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.bench.simulate import POLICIES, Cache, Outcome, Setting, pooled_hit, simulate
from gateway.bench.trace import Arrival
from gateway.core.blocks import BlockHash, Chain
from gateway.core.cost import Coefficients, Speed

SPEED = Speed(Coefficients(1.0, 0.1, 0.0), 0.5)
"""A request takes 1 s, a token 0.1 s; an output token 0.5 s."""


def arrival(at: float, *blocks: int, rest: int = 1, output: int = 0) -> Arrival:
    """Blocks of 10 tokens, and ``rest`` tokens behind them."""
    hashes = tuple(map(BlockHash, blocks))
    return Arrival(at, Chain(hashes, 10, 10 * len(blocks) + rest), output)


def setting(workers: int = 1, cache_tokens: int = 1000, time_factor: float = 1.0) -> Setting:
    return Setting(workers, time_factor, cache_tokens, SPEED)


def test_a_worker_serves_first_come_first_served_and_decodes_before_the_next() -> None:
    arrivals = [
        arrival(0.0, 1, output=4),  # 11 tokens: 2.1 s, then 2 s of decode
        arrival(1.0, 1, 2),  # begins at 4.1; 10 of 21 tokens are cached: 2.1 s
        arrival(20.0, 1),  # idle: 1.1 s
    ]
    found = simulate("default", arrivals, setting())
    assert found.first_token_seconds == pytest.approx([2.1, 5.2, 1.1])
    assert found.delivered_tokens == found.predicted_tokens == 20
    assert found.hit == found.predicted_hit == pytest.approx(20 / 43)
    assert found.in_flight_seconds == [pytest.approx(4.1 + 5.2 + 1.1)]


def test_the_time_factor_brings_requests_closer() -> None:
    arrivals = [arrival(0.0, 1), arrival(4.0, 2)]
    assert simulate("default", arrivals, setting()).first_token_seconds[1] == pytest.approx(2.1)
    found = simulate("default", arrivals, setting(time_factor=4.0))
    assert found.first_token_seconds[1] == pytest.approx(2.1 + 1.1)


def test_what_is_delivered_is_the_engines_affair() -> None:
    """The study's map never forgets; the engine has room for two blocks."""
    arrivals = [arrival(at, block) for at, block in ((0.0, 1), (9.0, 2), (18.0, 3), (27.0, 1))]
    found = simulate("sticky", arrivals, setting(cache_tokens=20))
    assert (found.delivered_tokens, found.predicted_tokens) == (0, 10)
    found = simulate("default", arrivals, setting(cache_tokens=20))
    assert (found.delivered_tokens, found.predicted_tokens) == (0, 0)


def test_lengths_of_outputs_are_hidden_until_requests_end() -> None:
    """Which answer is long cannot be known: what comes before the first end is placed alike."""

    def placed(long: int) -> list[float]:
        arrivals = [arrival(0.1 * i, i, output=90 if i == long else 9) for i in range(6)]
        return simulate("default", arrivals, setting(workers=3)).first_token_seconds[:3]

    assert placed(0) == placed(1) == placed(2)


def test_balance_is_the_fullest_worker_over_the_mean() -> None:
    assert Outcome("p", in_flight_seconds=[3.0, 1.0]).balance == 1.5
    one_prefix = [arrival(float(i), 1) for i in range(9)]
    assert simulate("sticky", one_prefix, setting(workers=3)).balance == 3.0
    assert simulate("round_robin", one_prefix, setting(workers=3)).balance == pytest.approx(1, 0.2)


def test_the_pool_is_one_cache_of_the_total_size() -> None:
    arrivals = [arrival(0.0, 1), arrival(1.0, 2), arrival(2.0, 1), arrival(3.0, 2)]
    assert pooled_hit(arrivals, setting(workers=2, cache_tokens=10)) == pytest.approx(20 / 44)
    assert pooled_hit(arrivals, setting(workers=1, cache_tokens=10)) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_all_and_predicts_what_an_endless_cache_delivers(policy: str) -> None:
    numbers = count(100)
    arrivals = [
        arrival(0.2 * i, 1, 2 + i % 3, next(numbers), rest=i % 10, output=i % 4) for i in range(60)
    ]
    found = simulate(policy, arrivals, setting(workers=3, cache_tokens=10**6))
    assert len(found.first_token_seconds) == 60
    assert min(found.first_token_seconds) >= 1.0
    assert found.delivered_tokens == found.predicted_tokens <= 20 * 60
    assert 1.0 <= found.balance <= 3.0


BLOCKS = st.lists(st.integers(0, 30), max_size=8, unique=True)


@given(st.lists(BLOCKS), st.integers(0, 12))
def test_the_cache_is_a_least_recently_used_one(prompts: list[list[int]], capacity: int) -> None:
    cache = Cache(10 * capacity)
    held: list[int] = []
    for blocks in prompts:
        wanted = next((i for i, block in enumerate(blocks) if block not in held), len(blocks))
        chain = Chain(tuple(map(BlockHash, blocks)), 10, 10 * len(blocks) + 1)
        assert cache.take(chain) == 10 * wanted
        held = [block for block in held if block not in blocks] + blocks[::-1]
        held = held[max(0, len(held) - capacity) :]


def test_the_last_token_is_always_computed() -> None:
    cache = Cache(100)
    chain = Chain((BlockHash(1), BlockHash(2)), 10, 20)
    assert [cache.take(chain), cache.take(chain)] == [0, 10]


def test_a_peers_belief_has_its_own_size() -> None:
    found = {name: setting(cache_tokens=1000).believed_tokens(name) for name in POLICIES}
    own = {"cache_aware", "llm_d_approximate", "sticky"}
    assert {found[name] for name in set(found) - own} == {1000}
    assert (found["cache_aware"], found["llm_d_approximate"]) == (8_388_608, 4000)
    assert found["sticky"] > 10**15
