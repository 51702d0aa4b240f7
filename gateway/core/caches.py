"""What each worker has cached, as far as can be known: the index, and how far to trust it."""

from __future__ import annotations

from gateway.core.belief import Delivered
from gateway.core.blocks import Chain
from gateway.core.prefix_index import PrefixIndex
from gateway.core.request import Usage
from gateway.core.reservation import Reservation
from gateway.core.worker import Loss, Worker


class Caches:
    """Keeps the index in step with the life of requests. Owned by the router."""

    def __init__(self, index: PrefixIndex, default_capacity_blocks: int) -> None:
        self._index = index
        self._default_capacity_blocks = default_capacity_blocks

    def cached_tokens(self, worker: Worker, chain: Chain) -> int:
        """Leading tokens of the prompt that the engine should find in its cache."""
        return self._index.match(worker.id, chain) * chain.block_tokens

    def placed(self, worker: Worker, reservation: Reservation) -> None:
        capacity_tokens = self._counted_tokens(worker)
        reservation.stored = self._index.store(worker.id, reservation.chain, capacity_tokens)

    def not_computed(self, worker: Worker, reservation: Reservation) -> None:
        """The engine was not reached, refused the prompt, or was left before it had computed it."""
        if reservation.stored is not None and reservation.generation == worker.generation:
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
        delivered = Delivered(
            predicted_tokens=reservation.cached_tokens,
            cached_tokens=usage.cached_tokens,
            age_share=stored.age_tokens / self._engine_tokens(worker),
            before=stored.before,
            use=stored.use,
        )
        kept_from = worker.belief.judge(delivered)
        if kept_from is None:
            return False
        worker.new_generation(Loss.OVER_PREDICTED)
        self._index.drop_before(worker.id, kept_from)
        return True

    def lost(self, worker: Worker, why: Loss) -> None:
        """The worker's cache is empty: a new generation, which has no blocks and no credits."""
        worker.new_generation(why)
        self._index.drop(worker.id)

    def _engine_tokens(self, worker: Worker) -> int:
        engine = worker.engine
        return (engine.capacity_blocks or self._default_capacity_blocks) * engine.block_size

    def _counted_tokens(self, worker: Worker) -> int:
        """What of the engine's cache counts."""
        return int(self._engine_tokens(worker) * worker.belief.share)
