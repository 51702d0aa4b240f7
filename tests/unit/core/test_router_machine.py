"""The router through any sequence of events, beside a model that keeps lists of what lives."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.core.blocks import BYTE_BLOCK_BYTES, Prompt, token_bytes
from gateway.core.cost import Coefficients, Speed
from gateway.core.options import Options
from gateway.core.placement import POLICIES
from gateway.core.request import Request, Result, Usage
from gateway.core.reservation import Phase, Reservation, WorkerId
from gateway.core.router import NoWorker, Router
from gateway.core.worker import Engine, Loss
from tests.unit.core.naive_index import Key, NaiveLru, block_tokens

WORKERS = tuple(WorkerId(name) for name in "abc")
HARD_CAP = 40
DEFAULT_BLOCKS = 9
ROUNDING_SECONDS = 1e-9
"""What sums of floats may be off while requests live; idle they are exact."""

SPEED = Speed(Coefficients(0.05, 1e-2, 1e-4), 1e-1)

UNREAD = Prompt(b"", True)
"""What a request counts as whose prompt is not known: one token, no block."""

EXTRAS = st.sampled_from((b"", b"lora"))
# One family of texts: any two share the beginning up to the shorter one's last few ids.
TOKENS = st.builds(
    lambda length, tail, extra: Prompt(token_bytes([0] * length + tail), True, extra),
    st.integers(0, 20),
    st.lists(st.integers(0, 1), max_size=6),
    EXTRAS,
)
BYTES = st.builds(
    lambda blocks, tail, extra: Prompt(b"x" * (blocks * BYTE_BLOCK_BYTES) + tail, False, extra),
    st.integers(0, 4),
    st.sampled_from((b"", b"y", b"y" * BYTE_BLOCK_BYTES)),
    EXTRAS,
)
REQUESTS = st.builds(
    Request,
    prompt=st.one_of(st.none(), TOKENS, TOKENS, TOKENS, BYTES),
    model=st.sampled_from((None, "m", "n")),
    max_tokens=st.sampled_from((None, 0, 1, 50)),
    stream=st.booleans(),
)
ENGINES = st.builds(Engine, st.sampled_from((1, 2, 4)), st.sampled_from((None, 1, 3, 8, 40)))
USAGES = st.builds(Usage, st.integers(0, 40), st.integers(0, 30), st.sampled_from((None, 10**6)))
"""No prediction fails: what a worker's belief makes of that has tests of its own."""

RESULTS = st.builds(Result, st.one_of(st.none(), USAGES), st.booleans())


class RouterMachine(RuleBasedStateMachine):
    """Rules are what the shell may do in any order; invariants hold between any two."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def start(self, policy: str) -> None:
        self.router = Router(
            Options(
                policy=POLICIES[policy],
                max_index_blocks=HARD_CAP,
                speed=SPEED,
                default_capacity_blocks=DEFAULT_BLOCKS,
            )
        )
        self.now = 100.0
        self.live: list[tuple[Reservation, Request, tuple[int, list[Key]]]] = []
        self.settled: list[Reservation] = []
        self.generations = dict.fromkeys(WORKERS, 0)
        self.held = {worker: NaiveLru() for worker in WORKERS}
        for worker in WORKERS:
            self.router.add_worker(worker)
            self.router.set_ready(worker, True)

    @rule(seconds=st.sampled_from((0.001, 0.1, 1.0, 60.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(worker=st.sampled_from(WORKERS), ready=st.booleans())
    def readiness(self, worker: WorkerId, ready: bool) -> None:
        self.router.set_ready(worker, ready, "" if ready else "away")

    @rule(worker=st.sampled_from(WORKERS), draining=st.booleans())
    def draining(self, worker: WorkerId, draining: bool) -> None:
        self.router.workers[worker].draining = draining

    @rule(worker=st.sampled_from(WORKERS), models=st.frozensets(st.sampled_from("mn")))
    def models(self, worker: WorkerId, models: frozenset[str]) -> None:
        self.router.set_models(worker, models)

    @rule(worker=st.sampled_from(WORKERS), engine=ENGINES)
    def engine(self, worker: WorkerId, engine: Engine) -> None:
        self.router.set_engine(worker, engine)

    @rule(worker=st.sampled_from(WORKERS))
    def new_generation(self, worker: WorkerId) -> None:
        self.generations[worker] += 1
        self.router.new_generation(worker, Loss.STARTED)
        self.held[worker].drop()

    @rule(request=REQUESTS, excluded=st.frozensets(st.sampled_from(WORKERS), max_size=2))
    def admit(self, request: Request, excluded: frozenset[WorkerId]) -> None:
        open_to = {w.id for w in self.router.workers.values() if w.available} - excluded
        serving = {w for w in open_to if request.model in self.router.workers[w].models}
        if not open_to:
            with pytest.raises(NoWorker) as raised:
                self.router.admit(request, self.now, excluded)
            assert set(raised.value.reasons) == set(WORKERS)
            return
        held = self.router.admit(request, self.now, excluded)
        assert held.worker_id in (serving or open_to)
        assert held.generation == self.generations[held.worker_id]
        self.live.append((held, request, self.admitted(held, request.prompt)))

    def admitted(self, held: Reservation, prompt: Prompt | None) -> tuple[int, list[Key]]:
        """Check what was promised; store as the naive index does and say what was new."""
        assert held.prefill_seconds >= 0 and held.decode_seconds >= 0
        assert held.prefill_end >= self.now
        engine = self.router.workers[held.worker_id].engine
        size = engine.block_size
        if prompt is None:
            prompt, size = UNREAD, 1
        naive = self.held[held.worker_id]
        tokens = block_tokens(prompt, size)
        assert held.cached_tokens == naive.match(prompt, size) * tokens
        assert held.cached_tokens <= (prompt.prompt_tokens - 1) // tokens * tokens
        assert held.cached_tokens + held.uncached_tokens == prompt.prompt_tokens
        capacity_tokens = (engine.capacity_blocks or DEFAULT_BLOCKS) * engine.block_size
        return naive.store(prompt, size, capacity_tokens, HARD_CAP // len(WORKERS))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def first_byte(self, data: st.DataObject) -> None:
        held, request, _ = data.draw(st.sampled_from(self.live))
        if request.stream:
            self.router.prefilled(held, self.now)
            assert held.phase is Phase.DECODE

    @precondition(lambda self: self.live)
    @rule(data=st.data(), result=RESULTS)
    def settle(self, data: st.DataObject, result: Result) -> None:
        number = data.draw(st.integers(0, len(self.live) - 1))
        held, request, stored = self.live.pop(number)
        self.router.settle(held, result, self.now)
        assert held.phase is Phase.SETTLED
        self.settled.append(held)
        if request.prompt is not None and held.generation == self.generations[held.worker_id]:
            self.answered(held, request.prompt, result, stored)

    def answered(
        self, held: Reservation, prompt: Prompt, result: Result, stored: tuple[int, list[Key]]
    ) -> None:
        naive = self.held[held.worker_id]
        if not result.computed:
            naive.forget(*stored)
        if result.usage is not None and result.usage.completion_tokens > 0:
            end = result.usage.prompt_tokens + result.usage.completion_tokens - 1
            engine = self.router.workers[held.worker_id].engine
            capacity_tokens = (engine.capacity_blocks or DEFAULT_BLOCKS) * engine.block_size
            size = held.chain.block_tokens if prompt.exact else 1
            naive.answered(prompt, size, (capacity_tokens, HARD_CAP // len(WORKERS)), end)

    @precondition(lambda self: self.settled)
    @rule(data=st.data(), result=RESULTS)
    def settle_again(self, data: st.DataObject, result: Result) -> None:
        held = data.draw(st.sampled_from(self.settled))
        with pytest.raises(ValueError, match="exactly once"):
            self.router.settle(held, result, self.now)

    @precondition(lambda self: self.settled)
    @rule(data=st.data())
    def first_byte_of_what_has_ended(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.settled))
        self.router.prefilled(held, self.now)
        assert held.phase is Phase.SETTLED

    @rule(prompt=st.one_of(TOKENS, BYTES), size=st.sampled_from((1, 2, 4)))
    def match(self, prompt: Prompt, size: int) -> None:
        for worker in WORKERS:
            matched = self.router.index.match(worker, prompt.chain(size))
            assert matched == self.held[worker].match(prompt, size)

    @invariant()
    def sums_are_those_of_the_parts(self) -> None:
        for worker in self.router.workers.values():
            mine = [held for held, _, _ in self.live if held.worker_id == worker.id]
            pending = worker.pending_seconds(self.now)
            waiting = [held for held in mine if held.phase is Phase.PREFILL]
            assert worker.in_flight == len(mine)
            assert worker.waiting == len(waiting)
            tokens = [held.cached_tokens + held.uncached_tokens for held in mine]
            assert worker.in_flight_tokens == sum(tokens)
            assert worker.waiting_tokens == sum(held.uncached_tokens for held in waiting)
            prefixes = Counter(held.prefix for held in waiting if held.prefix is not None)
            assert worker.waiting_behind == prefixes
            assert worker.decode_seconds == near(sum(held.decode_seconds for held in mine))
            whole = worker.prefill_ahead_seconds(-math.inf)
            assert whole == near(sum(held.prefill_seconds for held in waiting))
            ahead = worker.prefill_ahead_seconds(self.now)
            assert pending == near(ahead + worker.decode_seconds)
            assert ahead <= whole + ROUNDING_SECONDS

    @invariant()
    def nothing_is_negative_and_idle_is_exactly_zero(self) -> None:
        for worker in self.router.workers.values():
            pending = worker.pending_seconds(self.now)
            assert pending >= -ROUNDING_SECONDS
            assert worker.decode_seconds >= -ROUNDING_SECONDS
            assert worker.prefill_ahead_seconds(self.now) >= -ROUNDING_SECONDS
            assert worker.recent_seconds(self.now) >= 0
            fitted = worker.estimates.prefill.coefficients
            assert min(fitted.a, fitted.b, fitted.e) >= 0
            if not worker.in_flight:
                assert pending == worker.decode_seconds == 0.0

    @invariant()
    def the_index_is_bounded(self) -> None:
        blocks = [self.router.index.blocks(worker) for worker in WORKERS]
        assert blocks == [len(self.held[worker].held) for worker in WORKERS]
        assert sum(blocks) <= HARD_CAP

    def teardown(self) -> None:
        """Whatever happened, when all have ended nothing is left."""
        if not hasattr(self, "router"):
            return
        for held, _, _ in self.live:
            self.router.settle(held, Result(), self.now)
        for worker in self.router.workers.values():
            assert (worker.in_flight, worker.waiting) == (0, 0)
            assert worker.pending_seconds(self.now) == worker.decode_seconds == 0.0


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-9, abs=ROUNDING_SECONDS)


TestRouter = RouterMachine.TestCase
TestRouter.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
