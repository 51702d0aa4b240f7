"""500 users with one system prompt, in simulated time: are all workers used, and is it cached?

Each worker computes prefills first come first served, then 0.19 ms of busy time per output token;
what the router expects in a cache is there. A user asks once, the next as soon as an answer is
complete.
"""

from __future__ import annotations

import heapq
from collections import Counter
from itertools import count

from gateway.core.blocks import BlockHash, Chain, Prompt
from gateway.core.cost import Coefficients, Speed
from gateway.core.options import Options
from gateway.core.placement import POLICIES
from gateway.core.request import Request, Result, Usage
from gateway.core.reservation import Reservation, WorkerId
from gateway.core.router import Router
from gateway.core.worker import Engine
from tests.bench.figures import Figure, as_json, print_figures

WORKERS, IN_FLIGHT, USERS = 4, 64, 500
SHARED_TOKENS, OWN_TOKENS, OUTPUT_TOKENS, BLOCK_TOKENS = 4096, 256, 128, 16
PROMPT_TOKENS = SHARED_TOKENS + OWN_TOKENS
SPEED = Speed(Coefficients(0.005, 2.5e-5, 1.5e-9), 0.19e-3)
ANSWER = Result(Usage(PROMPT_TOKENS, OUTPUT_TOKENS, 0))


class Simulation:
    """A closed loop of IN_FLIGHT users; ``area`` is in-flight requests times seconds."""

    def __init__(self, policy: str) -> None:
        self.router = Router(Options(POLICIES[policy], speed=SPEED))
        self.area: Counter[WorkerId] = Counter()
        self.cached_tokens = 0
        self.now = 0.0
        self._free_at: dict[WorkerId, float] = {}
        self._events: list[tuple[float, int, bool, Reservation]] = []
        self._numbers = count()
        for name in map(str, range(WORKERS)):
            self.router.add_worker(WorkerId(name))
            self.router.set_engine(WorkerId(name), Engine(BLOCK_TOKENS, 30_000))
            self.router.set_ready(WorkerId(name), True)

    def run(self) -> None:
        for number in range(IN_FLIGHT):
            self._ask(number)
        asked = IN_FLIGHT
        while self._events:
            at, _, ended, reservation = heapq.heappop(self._events)
            for worker in self.router.workers.values():
                self.area[worker.id] += worker.in_flight * (at - self.now)
            self.now = at
            if not ended:
                self.router.prefilled(reservation, at)
                continue
            self.router.settle(reservation, ANSWER, at)
            if asked < USERS:
                self._ask(asked)
                asked += 1

    def _ask(self, number: int) -> None:
        first_own = SHARED_TOKENS + number * OWN_TOKENS
        tokens = (*range(0, SHARED_TOKENS, BLOCK_TOKENS),
                  *range(first_own, first_own + OWN_TOKENS, BLOCK_TOKENS))  # fmt: skip
        chain = Chain(tuple(map(BlockHash, tokens)), BLOCK_TOKENS, PROMPT_TOKENS)
        prompt = Prompt(b"", True, _chains={BLOCK_TOKENS: chain})
        held = self.router.admit(Request(prompt, stream=True), self.now)
        self.cached_tokens += held.cached_tokens
        begins = max(self.now, self._free_at.get(held.worker_id, 0.0))
        first_token = begins + SPEED.prefill.seconds(held.uncached_tokens, held.cached_tokens)
        end = first_token + OUTPUT_TOKENS * SPEED.decode_seconds_per_token
        self._free_at[held.worker_id] = end
        for at, ended in ((first_token, False), (end, True)):
            heapq.heappush(self._events, (at, next(self._numbers), ended, held))


def measure() -> dict[str, object]:
    simulation = Simulation("prefix_affinity")
    simulation.run()
    balance = max(simulation.area.values()) * WORKERS / sum(simulation.area.values())
    # At best each worker computes the shared part once.
    most_cached = SHARED_TOKENS * (USERS - WORKERS)
    figures = [
        Figure("in flight, max/mean over workers", balance, "<=", 1.3),
        Figure("hit ratio of the best possible", simulation.cached_tokens / most_cached, ">=", 0.9),
    ]
    print_figures(figures)
    return {"figures": as_json(figures)}
