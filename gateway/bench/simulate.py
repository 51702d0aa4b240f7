"""A trace replayed through the router itself, in simulated time, under one policy after another.

The model of a worker: one server, first come first served. A request takes the prefill seconds of
what its cache does not deliver, then busy seconds for each output token. The cache is an LRU of
full blocks, stored when a request is placed, of equal age the tail of a chain evicted first. What
an answer generates is not in it. The router is told what a gateway would see: first tokens when
they come, output lengths when requests end. Its speeds are the model's from the start.

What the router believes to be cached is its own affair (a peer's belief has the peer's own size);
*delivered* is what the simulated cache held.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from gateway.bench.trace import Arrival
from gateway.core.baselines import BASELINES
from gateway.core.blocks import BlockHash, Chain, Prompt
from gateway.core.cost import Coefficients, DecodeEstimate, Estimates, PrefillFit, Speed
from gateway.core.options import Options
from gateway.core.placement import Policy, prefix_affinity
from gateway.core.request import Request, Result
from gateway.core.reservation import Reservation, WorkerId
from gateway.core.router import Router
from gateway.core.worker import Engine

DEFAULT = "default"
"""What the gateway does where nothing is set."""

POLICIES: dict[str, Policy] = {DEFAULT: prefix_affinity, **BASELINES}

MODEL_SPEED = Speed(Coefficients(0.0, 1 / 40_000, 1.5e-9), 0.19e-3)
"""An 8B model on one data-centre GPU that does nothing else meanwhile."""

_ENDLESS = 1 << 60
"""Tokens; more than any trace has."""

_BLOCK_TOKENS = 1
"""What the workers say of themselves: capacities are counted in tokens, each chain knows its own
block size."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated. ``time_factor`` divides the trace's times; ``cache_tokens`` is the size of
    each worker's cache."""

    workers: int
    time_factor: float = 1.0
    cache_tokens: int = 850_944
    speed: Speed = MODEL_SPEED
    social_weight: float = 6.0

    def believed_tokens(self, policy: str) -> int:
        """Capacity of a worker's cache in the belief of a router of that kind."""
        return {
            "cache_aware": 1 << 23,  # 2^25 characters a worker
            "llm_d_approximate": 4 * self.cache_tokens,  # counts blocks of 16, keeps blocks of 64
            "sticky": _ENDLESS,
        }.get(policy, self.cache_tokens)


class Cache:
    """An engine's prefix cache: blocks, the least recently used first."""

    def __init__(self, capacity_tokens: int) -> None:
        self._left_tokens = capacity_tokens
        self._blocks: OrderedDict[BlockHash, int] = OrderedDict()

    def take(self, chain: Chain) -> int:
        """Leading tokens of the prompt that are held; then its blocks are the latest used."""
        blocks, hashes = self._blocks, chain.hashes
        held = 0
        while held < len(hashes) and hashes[held] in blocks:
            held += 1
        for block in reversed(hashes):
            if block in blocks:
                blocks.move_to_end(block)
            else:
                blocks[block] = chain.block_tokens
                self._left_tokens -= chain.block_tokens
        while self._left_tokens < 0:
            self._left_tokens += blocks.popitem(last=False)[1]
        # The engine always computes the last prompt token.
        return min(held, chain.usable_blocks) * chain.block_tokens


@dataclass(slots=True)
class Busy:
    """One worker's time: when it is free, and requests in flight times seconds."""

    cache: Cache
    free_at: float = 0.0
    in_flight_seconds: float = 0.0


@dataclass(slots=True)
class Outcome:
    """One policy's figures: ratios of prompt tokens delivered from caches (and predicted by the
    router), times to first token in seconds, unordered."""

    policy: str
    prompt_tokens: int = 0
    delivered_tokens: int = 0
    predicted_tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)
    in_flight_seconds: list[float] = field(default_factory=list)

    @property
    def hit(self) -> float:
        return self.delivered_tokens / self.prompt_tokens

    @property
    def predicted_hit(self) -> float:
        return self.predicted_tokens / self.prompt_tokens

    @property
    def balance(self) -> float:
        """Mean requests in flight on the fullest worker over the mean of all: 1 is even, the number
        of workers is all on one."""
        return (
            max(self.in_flight_seconds) * len(self.in_flight_seconds) / sum(self.in_flight_seconds)
        )


class _Event(NamedTuple):
    at: float
    number: int
    held: Reservation
    output_tokens: int | None
    """None at the first token."""


class _KnownPrefill(PrefillFit):
    """The model's own seconds: there is nothing to learn."""

    def observe(
        self, uncached_tokens: int, cached_tokens: int, began: float, ended: float, worker: str = ""
    ) -> None:
        pass


class _Simulation:
    """Owns the router, the workers' caches and the events to come."""

    def __init__(self, policy: str, setting: Setting, arrivals: Sequence[Arrival]) -> None:
        believed = setting.believed_tokens(policy)
        least = min(arrival.chain.block_tokens for arrival in arrivals)
        most_blocks = sum(len(arrival.chain.hashes) for arrival in arrivals)
        self.setting = setting
        self.outcome = Outcome(policy)
        self.workers: dict[WorkerId, Busy] = {}
        self.router = Router(
            Options(
                POLICIES[policy],
                social_weight=setting.social_weight,
                max_index_blocks=setting.workers * min(believed // least + 1, most_blocks + 1),
                speed=setting.speed,
            )
        )
        self._events: list[_Event] = []
        self._numbers = count()
        self.estimates = Estimates(
            _KnownPrefill(setting.speed.prefill),
            DecodeEstimate(setting.speed.decode_seconds_per_token),
        )
        for name in map(WorkerId, map(str, range(setting.workers))):
            self.workers[name] = Busy(Cache(setting.cache_tokens))
            self.router.add_worker(name).estimates = self.estimates
            self.router.set_engine(name, Engine(_BLOCK_TOKENS, believed))
            self.router.set_ready(name, True)

    def arrive(self, arrival: Arrival, now: float) -> None:
        chain = arrival.chain
        prompt = Prompt(b"", True, _chains={_BLOCK_TOKENS: chain})
        held = self.router.admit(Request(prompt, stream=True), now)
        worker = self.workers[held.worker_id]
        cached = worker.cache.take(chain)
        speed = self.setting.speed
        begins = max(now, worker.free_at)
        first = begins + speed.prefill.seconds(chain.prompt_tokens - cached, cached)
        output_tokens = arrival.output_tokens
        end = worker.free_at = first + output_tokens * speed.decode_seconds_per_token
        worker.in_flight_seconds += end - now
        heapq.heappush(self._events, _Event(first, next(self._numbers), held, None))
        heapq.heappush(self._events, _Event(end, next(self._numbers), held, output_tokens))
        self.outcome.first_token_seconds.append(first - now)
        self.outcome.prompt_tokens += chain.prompt_tokens
        self.outcome.delivered_tokens += cached
        self.outcome.predicted_tokens += held.cached_tokens

    def pass_until(self, now: float) -> None:
        """Tell the router of all first tokens and ends up to ``now``."""
        while self._events and self._events[0].at <= now:
            at, _, held, output_tokens = heapq.heappop(self._events)
            if output_tokens is None:
                self.router.prefilled(held, at)
                continue
            # Without usage: it would teach a rate that is known, and credit what is not cached.
            self.router.settle(held, Result(), at)
            self.estimates.decode.observe(output_tokens)


def simulate(policy: str, arrivals: Sequence[Arrival], setting: Setting) -> Outcome:
    """Replay the arrivals, at least one and in order of time, under a policy of ``POLICIES``."""
    run = _Simulation(policy, setting, arrivals)
    for arrival in arrivals:
        now = arrival.at_seconds / setting.time_factor
        run.pass_until(now)
        run.arrive(arrival, now)
    run.outcome.in_flight_seconds = [worker.in_flight_seconds for worker in run.workers.values()]
    return run.outcome


def pooled_hit(arrivals: Sequence[Arrival], setting: Setting) -> float:
    """The hit ratio of one cache as large as all workers' together."""
    cache = Cache(setting.cache_tokens * setting.workers)
    cached = sum(cache.take(arrival.chain) for arrival in arrivals)
    return cached / sum(arrival.chain.prompt_tokens for arrival in arrivals)
