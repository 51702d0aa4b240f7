"""What each worker has cached: by its engine's events where they are whole, else by estimate.

The estimate (the index, and how far to trust it) is kept all the time, so that it is there at once
when events fail, and so that each request can say how good either was.
"""

from __future__ import annotations

from gateway.core.belief import Delivered
from gateway.core.blocks import Chain
from gateway.core.engine_cache import AllCleared, BlocksRemoved, BlocksStored, Event, OtherCache
from gateway.core.followed import Followed
from gateway.core.prediction import Prediction
from gateway.core.prefix_index import PrefixIndex
from gateway.core.request import Result, Usage
from gateway.core.reservation import Reservation, WorkerId
from gateway.core.worker import Loss, Worker

_NO_BOUND = 1 << 62


class Caches:
    """Keeps the index in step with the life of requests. Owned by the router."""

    def __init__(self, index: PrefixIndex, default_capacity_blocks: int) -> None:
        self._index = index
        self._default_capacity_blocks = default_capacity_blocks
        self.followed: dict[WorkerId, Followed] = {}

    def add(self, worker_id: WorkerId) -> None:
        self._index.add(worker_id)
        self.followed[worker_id] = Followed()
        for followed in self.followed.values():
            followed.cache.max_blocks = self._index.max_blocks // len(self.followed)

    def apply(self, worker_id: WorkerId, event: Event) -> None:
        """The worker's engine tells of its cache; ``Followed.applied`` ends each batch."""
        followed = self.followed[worker_id]
        match event:
            case BlocksStored():
                followed.cache.store(event)
            case BlocksRemoved():
                followed.cache.remove(event)
            case AllCleared():
                self._cleared(worker_id)
            case OtherCache():
                followed.hybrid = True

    def _cleared(self, worker_id: WorkerId) -> None:
        self._index.drop(worker_id)
        for chain in self.followed[worker_id].cleared():
            self._index.store(worker_id, chain, _NO_BOUND)

    def predict(self, worker: Worker, chain: Chain) -> Prediction:
        """Leading blocks of the prompt that the engine should find in its cache."""
        estimated = self._index.match(worker.id, chain)
        return Prediction(estimated, self.followed[worker.id].told(chain))

    def placed(self, worker: Worker, reservation: Reservation) -> None:
        capacity_tokens = self._counted_tokens(worker)
        reservation.stored = self._index.store(worker.id, reservation.chain, capacity_tokens)
        reservation.expected = self.followed[worker.id].expect(reservation.chain)

    def settled(self, worker: Worker, reservation: Reservation, result: Result) -> None:
        """``computed`` is False where the engine was not reached, refused the prompt, or was left
        before it had computed it."""
        if reservation.expected is not None:
            computed_tokens = 0 if result.usage is None else result.usage.computed_tokens
            followed = self.followed[worker.id]
            followed.settled(reservation.chain, reservation.expected, computed_tokens)
        current = reservation.generation == worker.generation
        if current and not result.computed and reservation.stored is not None:
            self._index.forget(worker.id, reservation.stored)

    def answered(self, worker: Worker, reservation: Reservation, usage: Usage) -> bool:
        """True where the answer gives away that the worker has lost what it had cached."""
        if reservation.generation != worker.generation:
            return False
        # The engine never computes the state of the last token that it produced.
        end_tokens = usage.prompt_tokens + usage.completion_tokens - 1
        capacity_tokens = self._counted_tokens(worker)
        self._index.answered(worker.id, reservation.chain, capacity_tokens, end_tokens)
        stored = reservation.stored
        if usage.cached_tokens is None or stored is None:
            return False
        prediction = reservation.prediction
        delivered = Delivered(
            predicted_tokens=prediction.estimated * reservation.chain.block_tokens,
            cached_tokens=usage.cached_tokens,
            age_share=stored.age_tokens / self._engine_tokens(worker),
            before=stored.before,
            use=stored.use,
        )
        kept_from = worker.belief.judge(delivered)
        if kept_from is None:
            return False
        self._index.drop_before(worker.id, kept_from)
        if prediction.told is not None:
            return False  # only the estimate was wrong
        worker.new_generation(Loss.OVER_PREDICTED)
        return True

    def lost(self, worker: Worker, why: Loss) -> None:
        """The worker's cache is empty: a new generation, which has no blocks and no credits."""
        worker.new_generation(why)
        self._index.drop(worker.id)
        self.followed[worker.id].emptied()

    def _engine_tokens(self, worker: Worker) -> int:
        engine = worker.engine
        return (engine.capacity_blocks or self._default_capacity_blocks) * engine.block_size

    def _counted_tokens(self, worker: Worker) -> int:
        """What of the engine's cache counts."""
        return int(self._engine_tokens(worker) * worker.belief.share)
