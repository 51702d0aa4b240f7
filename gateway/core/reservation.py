"""What one placed request holds on its worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NewType

from gateway.core.blocks import BlockHash, Chain
from gateway.core.held_blocks import Stored
from gateway.core.prediction import UNKNOWN, Expected, Prediction

WorkerId = NewType("WorkerId", str)


class Phase(StrEnum):
    """A reservation's life: it waits for its first token, decodes, and is settled once."""

    PREFILL = "prefill"
    DECODE = "decode"
    SETTLED = "settled"


class Cost(NamedTuple):
    """What placing a prompt on a worker would have cost, when it was placed."""

    worker_id: WorkerId
    seconds: float


class Shadow(NamedTuple):
    """Where the shadow policy would have placed a prompt, and what is cached there of it."""

    worker_id: WorkerId
    cached_tokens: int


@dataclass(slots=True, eq=False)
class Reservation:
    """What one placed request holds on its worker, from ``admit`` to ``settle``.

    ``prefill_end`` is the estimated time of its first token, in the caller's clock. ``expected``
    is None where the worker's events are not followed. ``prefix``: the last block of the prompt
    that any worker had.
    """

    worker_id: WorkerId
    generation: int
    chain: Chain
    cached_tokens: int
    uncached_tokens: int
    prefill_seconds: float
    decode_seconds: float
    stream: bool
    admitted_at: float
    costs: Sequence[Cost] = ()
    shadow: Shadow | None = None
    prediction: Prediction = UNKNOWN
    stored: Stored | None = None
    expected: Expected | None = None
    prefill_end: float = 0.0
    decode_at: float = 0.0
    phase: Phase = Phase.PREFILL
    prefix: BlockHash | None = None
