"""What the endpoints need, put together once by the composition root."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.core.router import Router
from gateway.core.worker import WorkerId
from gateway.observe.metrics import Metrics
from gateway.prompt.reader import Prompts
from gateway.upstream.pool import Pool


@dataclass(frozen=True, slots=True)
class Limits:
    """``head_seconds``: from the request's last byte to the answer's head; ``idle_seconds``:
    between two reads of a body; ``heartbeat_seconds``: silence before a comment line in a stream,
    None for none. There is no limit on the whole of an answer."""

    max_body_bytes: int
    head_seconds: float
    idle_seconds: float
    heartbeat_seconds: float | None


@dataclass(frozen=True, slots=True)
class Deps:
    """Shared by all requests. ``unreachable(worker_id, why)`` reports a failed connection."""

    router: Router
    pools: Mapping[WorkerId, Pool]
    prompts: Prompts
    metrics: Metrics
    limits: Limits
    unreachable: Callable[[WorkerId, str], None]
    fresh_id: Callable[[], bytes]
