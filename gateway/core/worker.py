"""One worker as the core sees it, and the reservations that it carries."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from math import exp

from gateway.core.belief import Belief
from gateway.core.blocks import BlockHash
from gateway.core.cost import Estimates
from gateway.core.reservation import Phase, Reservation, WorkerId

_RECENT_SECONDS = 30.0
"""Time constant of the memory that breaks ties between idle workers."""


class Loss(StrEnum):
    """Why what a worker had cached is gone."""

    STARTED = "started"
    SLEPT = "slept"
    RESET = "reset"
    OVER_PREDICTED = "over_predicted"


@dataclass(frozen=True, slots=True)
class Engine:
    """What is known of a worker's engine; ``None`` where it is not."""

    block_size: int = 16
    capacity_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


@dataclass(slots=True, eq=False)
class Worker:
    """State of one worker. Sums are kept beside the reservations that they are the sum of.

    ``in_flight_tokens``: prompt tokens of all reservations. ``waiting_tokens``: uncached prompt
    tokens of those that wait for their first token. ``waiting_behind``: how many of those
    have each prefix.
    """

    id: WorkerId
    estimates: Estimates
    engine: Engine = field(default_factory=Engine)
    models: frozenset[str] = frozenset()
    generation: int = 0
    losses: Counter[Loss] = field(default_factory=Counter)
    belief: Belief = field(default_factory=Belief)
    ready: bool = False
    draining: bool = False
    reason: str = "not started"
    in_flight: int = 0
    in_flight_tokens: int = 0
    waiting_tokens: int = 0
    waiting_behind: dict[BlockHash, int] = field(default_factory=dict)
    answers: int = 0
    decode_seconds: float = 0.0
    _waiting: OrderedDict[int, Reservation] = field(default_factory=OrderedDict)
    _waiting_seconds: float = 0.0
    _last_prefill_end: float = 0.0
    _recent: float = 0.0
    _recent_at: float = 0.0

    @property
    def available(self) -> bool:
        return self.ready and not self.draining

    @property
    def waiting(self) -> int:
        """Requests that wait for their first token."""
        return len(self._waiting)

    def new_generation(self, why: Loss) -> None:
        self.generation += 1
        self.losses[why] += 1
        self.belief.renew()

    def pending_seconds(self, now: float) -> float:
        """Unfinished prefill plus expected decode work, seconds."""
        self._pass_plain(now)
        return self.prefill_ahead_seconds(now) + self.decode_seconds

    def prefill_ahead_seconds(self, now: float) -> float:
        if not self._waiting:
            return 0.0
        head = next(iter(self._waiting.values()))
        left = min(head.prefill_seconds, head.prefill_end - now)
        return self._waiting_seconds - head.prefill_seconds + (left if left > 0 else 0.0)

    def recent_seconds(self, now: float) -> float:
        """Decayed sum of the uncached prefill seconds placed here."""
        return self._recent * exp((self._recent_at - now) / _RECENT_SECONDS)

    def reserve(self, reservation: Reservation, now: float) -> None:
        reservation.prefill_end = (
            now + self.prefill_ahead_seconds(now) + reservation.prefill_seconds
        )
        self._waiting[id(reservation)] = reservation
        prefix = reservation.prefix
        if prefix is not None:
            self.waiting_behind[prefix] = self.waiting_behind.get(prefix, 0) + 1
        self._waiting_seconds += reservation.prefill_seconds
        self.decode_seconds += reservation.decode_seconds
        self.in_flight += 1
        self.in_flight_tokens += reservation.uncached_tokens + reservation.cached_tokens
        self.waiting_tokens += reservation.uncached_tokens
        self._recent = self.recent_seconds(now) + reservation.prefill_seconds
        self._recent_at = now

    def prefilled(self, reservation: Reservation, now: float) -> None:
        """First body byte of a stream. Plain answers admitted before it are past theirs too."""
        if reservation.phase is not Phase.PREFILL:
            return
        for earlier in list(self._waiting.values()):
            if earlier is reservation:
                break
            if not earlier.stream:
                self._finish_prefill(earlier, now)
        self._observe(reservation, now)
        self._finish_prefill(reservation, now)

    def release(self, reservation: Reservation) -> None:
        """Give back exactly what ``reserve`` took; a second time is an error."""
        if reservation.phase is Phase.SETTLED or self.in_flight <= 0:
            raise ValueError("a reservation is settled exactly once")
        if self._waiting.pop(id(reservation), None) is not None:
            self._waited(reservation)
        self.in_flight -= 1
        self.in_flight_tokens -= reservation.uncached_tokens + reservation.cached_tokens
        self.decode_seconds -= reservation.decode_seconds
        reservation.phase = Phase.SETTLED
        self._tidy()

    def _observe(self, reservation: Reservation, now: float) -> None:
        """A prefill begins at admission, or when the one before it ends if that is later."""
        began = max(reservation.admitted_at, self._last_prefill_end)
        if reservation.generation == self.generation and now > began:
            self.estimates.prefill.observe(
                reservation.uncached_tokens, reservation.cached_tokens, began, now, self.id
            )

    def _finish_prefill(self, reservation: Reservation, now: float) -> None:
        del self._waiting[id(reservation)]
        self._waited(reservation)
        reservation.phase = Phase.DECODE
        reservation.decode_at = now
        self._last_prefill_end = max(self._last_prefill_end, now)
        self._tidy()

    def _waited(self, reservation: Reservation) -> None:
        self._waiting_seconds -= reservation.prefill_seconds
        self.waiting_tokens -= reservation.uncached_tokens
        if reservation.prefix is not None:
            count = self.waiting_behind.pop(reservation.prefix) - 1
            if count:
                self.waiting_behind[reservation.prefix] = count

    def _pass_plain(self, now: float) -> None:
        """Plain answers show no first byte: at the head of the line their estimated end stands."""
        while self._waiting:
            head = next(iter(self._waiting.values()))
            if head.stream or head.prefill_end > now:
                return
            self._finish_prefill(head, head.prefill_end)

    def _tidy(self) -> None:
        """Sums of nothing are exactly zero: float error must not outlive the requests."""
        if not self._waiting:
            self._waiting_seconds = 0.0
        if not self.in_flight:
            self.decode_seconds = 0.0
