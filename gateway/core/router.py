"""The router: the one mutable object that knows the workers, their caches and their load.

Every method is synchronous and therefore a critical section under asyncio. The life of a request:
``admit`` matches, compares, places and reserves in one step; ``prefilled`` marks the first body
byte of a stream; ``settle`` gives back exactly what was reserved, once, whatever happened.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gateway.core.blocks import EMPTY_CHAIN
from gateway.core.caches import Caches
from gateway.core.cost import DecodeEstimate, Estimates, PrefillFit
from gateway.core.options import Options
from gateway.core.placement import Candidate, Fleet
from gateway.core.prefix_index import PrefixIndex
from gateway.core.prospects import longest_match, prospect
from gateway.core.request import Request, Result
from gateway.core.reservation import Cost, Phase, Reservation, Shadow, WorkerId
from gateway.core.sessions import Sessions
from gateway.core.worker import Engine, Loss, Worker


class NoWorker(Exception):
    """No worker can take the request; ``reasons`` says why for each that there is."""

    def __init__(self, reasons: dict[WorkerId, str]) -> None:
        super().__init__("no worker is available")
        self.reasons = reasons


class Router:
    """Owns workers, index and reservations."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._admitted = 0
        self._by_models: dict[frozenset[str], Estimates] = {}
        self.index = PrefixIndex(options.max_index_blocks)
        self.caches = Caches(self.index, options.default_capacity_blocks)
        self.sessions = Sessions()
        self.workers: dict[WorkerId, Worker] = {}

    def add_worker(self, worker_id: WorkerId) -> Worker:
        worker = Worker(worker_id, self._estimates(frozenset()))
        self.workers[worker_id] = worker
        self.caches.add(worker_id)
        return worker

    def set_ready(self, worker_id: WorkerId, ready: bool, reason: str = "") -> None:
        worker = self.workers[worker_id]
        worker.ready = ready
        worker.reason = reason

    def set_engine(self, worker_id: WorkerId, engine: Engine) -> None:
        self.workers[worker_id].engine = engine
        self.caches.followed[worker_id].capacity_blocks = engine.capacity_blocks

    def set_models(self, worker_id: WorkerId, models: frozenset[str]) -> None:
        worker = self.workers[worker_id]
        worker.models = models
        worker.estimates = self._estimates(models)

    def new_generation(self, worker_id: WorkerId, why: Loss) -> None:
        """The worker's cache is empty. In-flight requests stay reserved until they settle."""
        self.caches.lost(self.workers[worker_id], why)

    def admit(
        self, request: Request, now: float, excluded: Collection[WorkerId] = ()
    ) -> Reservation:
        """Place a request and reserve its work; raises NoWorker."""
        candidates, fleet = self.compare(request, self.eligible(request.model, excluded), now)
        chosen = self.choose(candidates, fleet)
        seconds = fleet.costs(candidates)
        costs = [Cost(c.worker.id, s) for c, s in zip(candidates, seconds, strict=True)]
        shadow = self._shadow(candidates, fleet)
        self._admitted += 1
        if request.session is not None:
            self.sessions.diverged += fleet.home is not None
            self.sessions.placed(request.session, chosen.worker.id)
        reservation = self._reserve(chosen, request, fleet)
        reservation.costs, reservation.shadow = costs, shadow
        return reservation

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
        candidates = [prospect(self.caches, worker, request, now) for worker in workers]
        ready = [worker for worker in self.workers.values() if worker.available]
        first = candidates[0]
        prompt_tokens = first.cached_tokens + first.uncached_tokens
        prefix = longest_match(request, candidates)
        waiting = sum([worker.waiting for worker in ready])
        if waiting and prefix is not None:
            waiting -= sum([worker.waiting_behind.get(prefix, 0) for worker in ready])
        fleet = Fleet(
            waiting / (len(ready) or 1),
            self._admitted,
            self._options.social_weight,
            first.worker.estimates.prefill.seconds(prompt_tokens, 0),
            now,
            self._home(request, candidates),
            prefix,
        )
        return candidates, fleet

    def _home(self, request: Request, candidates: Sequence[Candidate]) -> WorkerId | None:
        home = self.sessions.home(request.session)
        return None if home is None or any(c.cached_tokens for c in candidates) else home

    def choose(self, candidates: Sequence[Candidate], fleet: Fleet) -> Candidate:
        return self._options.policy(candidates, fleet)

    def _shadow(self, candidates: Sequence[Candidate], fleet: Fleet) -> Shadow | None:
        if self._options.shadow is None:
            return None
        chosen = self._options.shadow(candidates, fleet)
        return Shadow(chosen.worker.id, chosen.cached_tokens)

    def prefilled(self, reservation: Reservation, now: float) -> None:
        """The first body byte of a stream has arrived; later calls change nothing."""
        self.workers[reservation.worker_id].prefilled(reservation, now)

    def settle(self, reservation: Reservation, result: Result, now: float) -> bool:
        """End of a request, whatever its outcome; a second time is an error.

        True where its answer gave away that the worker has lost what it had cached.
        """
        worker = self.workers[reservation.worker_id]
        sharing = worker.in_flight
        decoding_since = reservation.decode_at if reservation.phase is Phase.DECODE else None
        worker.release(reservation)
        usage = result.usage
        self.caches.settled(worker, reservation, result)
        if usage is None or usage.completion_tokens <= 0:
            return False
        worker.answers += 1
        worker.estimates.decode.observe(usage.completion_tokens)
        if reservation.stream and decoding_since is not None and now > decoding_since:
            busy = (now - decoding_since) / sharing
            worker.estimates.decode.observe_rate(busy, usage.completion_tokens)
        return self.caches.answered(worker, reservation, usage)

    def _estimates(self, models: frozenset[str]) -> Estimates:
        found = self._by_models.get(models)
        if found is None:
            speed = self._options.speed
            decode = DecodeEstimate(speed.decode_seconds_per_token)
            found = self._by_models[models] = Estimates(PrefillFit(speed.prefill), decode)
        return found

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
            prediction=chosen.prediction,
        )
        worker.reserve(reservation, fleet.now)
        self.caches.placed(worker, reservation)
        return reservation
