"""What the endpoints need, put together once by the composition root."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.api.admin import ResetCaches
from gateway.core.reservation import WorkerId
from gateway.core.router import Router
from gateway.observe.journal import Journal
from gateway.observe.metrics import Metrics
from gateway.prompt.reader import Prompts
from gateway.upstream.pool import Pool


@dataclass(frozen=True, slots=True)
class Deps:
    """Shared by all requests. ``unreachable(worker_id, why)`` reports a failed connection;
    ``heartbeat_seconds`` is the silence before a comment line in a stream, None for none."""

    router: Router
    pools: Mapping[WorkerId, Pool]
    prompts: Prompts
    metrics: Metrics
    journal: Journal
    max_body_bytes: int
    heartbeat_seconds: float | None
    unreachable: Callable[[WorkerId, str], None]
    fresh_id: Callable[[], bytes]
    reset_caches: ResetCaches | None = None
