"""What is remembered of one request until the metrics are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from gateway.core.blocks import EMPTY_CHAIN, Chain
from gateway.core.request import Usage
from gateway.core.reservation import Cost, Reservation, Shadow


class Outcome(StrEnum):
    """How a request ended; each ends in exactly one way.

    A 4xx of the worker is ``ok``: it was delivered, and is the client's affair.
    """

    OK = "ok"
    CLIENT_GONE = "client_gone"
    REFUSED = "refused"
    UPSTREAM_ERROR = "upstream_error"
    UPSTREAM_TRUNCATED = "upstream_truncated"
    TIMEOUT = "timeout"


@dataclass(slots=True)
class Record:
    """Times are monotonic seconds; None where the request did not get that far."""

    started_at: float
    endpoint: str = ""
    request_id: bytes = b""
    outcome: Outcome = Outcome.UPSTREAM_ERROR
    worker: str = ""
    body_read_at: float | None = None
    placed_at: float | None = None
    first_byte_at: float | None = None
    predicted_cached_tokens: int = 0
    estimated_tokens: int = 0
    told_tokens: int | None = None
    costs: Sequence[Cost] = ()
    shadow: Shadow | None = None
    chain: Chain = EMPTY_CHAIN
    answered: bool = False
    usage: Usage | None = None
    computed: bool = False
    fallback: str | None = None

    def placed(self, reservation: Reservation, now: float) -> None:
        self.worker = reservation.worker_id
        self.computed = False
        self.predicted_cached_tokens = reservation.cached_tokens
        prediction, block_tokens = reservation.prediction, reservation.chain.block_tokens
        self.estimated_tokens = prediction.estimated * block_tokens
        told = prediction.told
        self.told_tokens = None if told is None else told * block_tokens
        self.costs = reservation.costs
        self.shadow = reservation.shadow
        self.chain = reservation.chain
        if self.placed_at is None:
            self.placed_at = now
