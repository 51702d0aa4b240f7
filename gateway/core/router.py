"""The router: the one mutable object that knows the workers, their caches and their load.

Every method is synchronous and therefore a critical section under asyncio. The life of a request:
``admit`` matches, compares, places and reserves in one step; ``prefilled`` marks the first body
byte of a stream; ``settle`` gives back exactly what was reserved, once, whatever happened.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import itemgetter

from gateway.core.blocks import EMPTY_CHAIN, BlockHash
from gateway.core.cost import GPU_SPEED, DecodeEstimate, Estimates, PrefillFit, Speed
from gateway.core.placement import Candidate, Fleet, Policy
from gateway.core.prefix_index import PrefixIndex
from gateway.core.request import Request, Result
from gateway.core.worker import Engine, Phase, Reservation, Worker, WorkerId

_cached_tokens = itemgetter(Candidate._fields.index("cached_tokens"))


class NoWorker(Exception):
    """No worker can take the request; ``reasons`` says why for each that there is."""

    def __init__(self, reasons: dict[WorkerId, str]) -> None:
        super().__init__("no worker is available")
        self.reasons = reasons


@dataclass(frozen=True, slots=True)
class Options:
    """``social_weight`` is k of the placement rule; ``max_index_blocks`` bounds the whole index."""

    policy: Policy
    social_weight: float = 6.0
    max_index_blocks: int = 4_000_000
    speed: Speed = GPU_SPEED
    default_capacity_blocks: int = 16_384


class Router:
    """Owns workers, index and reservations."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._admitted = 0
        self._by_models: dict[frozenset[str], Estimates] = {}
        self.index = PrefixIndex(options.max_index_blocks)
        self.workers: dict[WorkerId, Worker] = {}

    def add_worker(self, worker_id: WorkerId) -> Worker:
        worker = Worker(worker_id, self._estimates(frozenset()))
        self.workers[worker_id] = worker
        self.index.add(worker_id)
        return worker

    def set_ready(self, worker_id: WorkerId, ready: bool, reason: str = "") -> None:
        worker = self.workers[worker_id]
        worker.ready = ready
        worker.reason = reason

    def set_engine(self, worker_id: WorkerId, engine: Engine) -> None:
        self.workers[worker_id].engine = engine

    def set_models(self, worker_id: WorkerId, models: frozenset[str]) -> None:
        worker = self.workers[worker_id]
        worker.models = models
        worker.estimates = self._estimates(models)

    def new_generation(self, worker_id: WorkerId, generation: int) -> None:
        """The worker's cache is empty: its process was started anew. In-flight requests stay
        reserved until they settle."""
        self.workers[worker_id].generation = generation
        self.index.drop(worker_id)

    def admit(
        self, request: Request, now: float, excluded: Collection[WorkerId] = ()
    ) -> Reservation:
        """Place a request and reserve its work; raises NoWorker."""
        candidates, fleet = self.compare(request, self.eligible(request.model, excluded), now)
        chosen = self.choose(candidates, fleet)
        self._admitted += 1
        return self._reserve(chosen, request, fleet)

    def eligible(self, model: str | None, excluded: Collection[WorkerId] = ()) -> list[Worker]:
        """Available workers that serve the model; if none says so, all: the worker judges. Raises
        NoWorker."""
        ready = [w for w in self.workers.values() if w.available and w.id not in excluded]
        if not ready:
            raise NoWorker({w.id: w.reason or "excluded" for w in self.workers.values()})
        serving = [w for w in ready if model in w.models]
        return serving or ready

    def compare(
        self, request: Request, workers: Sequence[Worker], now: float
    ) -> tuple[list[Candidate], Fleet]:
        """What the policy decides by; ``workers`` must not be empty."""
        candidates = [self._candidate(worker, request, now) for worker in workers]
        ready = [worker for worker in self.workers.values() if worker.available]
        first = candidates[0]
        prompt_tokens = first.cached_tokens + first.uncached_tokens
        prefix = _longest_match(request, candidates)
        waiting = sum([worker.waiting for worker in ready])
        if waiting and prefix is not None:
            waiting -= sum([worker.waiting_behind.get(prefix, 0) for worker in ready])
        fleet = Fleet(
            waiting / (len(ready) or 1),
            self._admitted,
            self._options.social_weight,
            first.worker.estimates.prefill.seconds(prompt_tokens, 0),
            now,
            prefix,
        )
        return candidates, fleet

    def choose(self, candidates: Sequence[Candidate], fleet: Fleet) -> Candidate:
        return self._options.policy(candidates, fleet)

    def prefilled(self, reservation: Reservation, now: float) -> None:
        """The first body byte of a stream has arrived; later calls change nothing."""
        self.workers[reservation.worker_id].prefilled(reservation, now)

    def settle(self, reservation: Reservation, result: Result, now: float) -> None:
        """End of a request, whatever its outcome; a second time is an error."""
        worker = self.workers[reservation.worker_id]
        sharing = worker.in_flight
        decoding_since = reservation.decode_at if reservation.phase is Phase.DECODE else None
        worker.release(reservation)
        current = reservation.generation == worker.generation
        if not result.computed and current:
            self.index.forget(worker.id, reservation.chain.hashes[reservation.stored_from :])
        usage = result.usage
        if usage is None or usage.completion_tokens <= 0:
            return
        worker.answers += 1
        worker.estimates.decode.observe(usage.completion_tokens)
        if reservation.stream and decoding_since is not None and now > decoding_since:
            busy = (now - decoding_since) / sharing
            worker.estimates.decode.observe_rate(busy, usage.completion_tokens)
        if current:
            # The engine never computes the state of the last token that it produced.
            end = usage.prompt_tokens + usage.completion_tokens - 1
            self.index.credit(worker.id, reservation.chain.hashes, end)

    def _estimates(self, models: frozenset[str]) -> Estimates:
        found = self._by_models.get(models)
        if found is None:
            speed = self._options.speed
            decode = DecodeEstimate(speed.decode_seconds_per_token)
            found = self._by_models[models] = Estimates(PrefillFit(speed.prefill), decode)
        return found

    def _candidate(self, worker: Worker, request: Request, now: float) -> Candidate:
        if request.prompt is None:
            chain, prompt_tokens = EMPTY_CHAIN, 1
        else:
            chain = request.prompt.chain(worker.engine.block_size)
            prompt_tokens = chain.prompt_tokens
        cached = self.index.match(worker.id, chain) * chain.block_tokens
        uncached = prompt_tokens - cached
        prefill = worker.estimates.prefill.seconds(uncached, cached)
        return Candidate(worker, cached, uncached, prefill, worker.pending_seconds(now))

    def _reserve(self, chosen: Candidate, request: Request, fleet: Fleet) -> Reservation:
        worker = chosen.worker
        prompt = request.prompt
        chain = EMPTY_CHAIN if prompt is None else prompt.chain(worker.engine.block_size)
        reservation = Reservation(
            worker_id=worker.id,
            generation=worker.generation,
            chain=chain,
            cached_tokens=chosen.cached_tokens,
            uncached_tokens=chosen.uncached_tokens,
            prefill_seconds=chosen.prefill_seconds,
            decode_seconds=worker.estimates.decode.seconds(request.max_tokens),
            stream=request.stream,
            admitted_at=fleet.now,
            prefix=fleet.prefix,
        )
        worker.reserve(reservation, fleet.now)
        engine = worker.engine
        blocks = engine.capacity_blocks or self._options.default_capacity_blocks
        reservation.stored_from = self.index.store(worker.id, chain, blocks * engine.block_size)
        return reservation


def _longest_match(request: Request, candidates: Sequence[Candidate]) -> BlockHash | None:
    """The last block of the prompt that any candidate holds."""
    longest = max(candidates, key=_cached_tokens)
    if request.prompt is None or not longest.cached_tokens:
        return None
    chain = request.prompt.chain(longest.worker.engine.block_size)
    return chain.hashes[longest.cached_tokens // chain.block_tokens - 1]
