"""Why a request would go where it would go: the placement's own terms, without placing it."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core.placement import Candidate, Fleet
from gateway.core.request import Request
from gateway.core.reservation import WorkerId
from gateway.core.router import NoWorker, Router


@dataclass(frozen=True, slots=True)
class Considered:
    """One worker as the request sees it; ``cost_seconds`` is the sum of the first four times.

    ``prefill_ahead_seconds``: unfinished prefill that waits there. ``decode_seconds``: expected
    decode work of what runs there. ``prefill_seconds``: of the prompt's uncached tokens.
    ``delay_to_others_seconds``: that prefill, charged for each request that waits.
    ``recent_seconds`` breaks ties: decayed prefill that was placed there lately.
    """

    worker: WorkerId
    available: bool
    reason: str
    cached_tokens: int
    uncached_tokens: int
    prefill_ahead_seconds: float
    decode_seconds: float
    prefill_seconds: float
    delay_to_others_seconds: float
    cost_seconds: float
    recent_seconds: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """``worker`` is None where no worker would take the request. ``mode`` says what was compared:
    exact tokens, bytes, or the load only; ``block_size`` in how large blocks, in tokens (those of
    bytes by estimate)."""

    worker: WorkerId | None
    reason: str
    prompt_tokens: int
    block_size: int | None
    mode: str
    candidates: list[Considered]


def explain(router: Router, request: Request, now: float) -> Explanation:
    """How ``admit`` would place the request at this moment. Nothing is reserved or stored.

    Costs are those of prefix affinity, whatever the router's policy."""
    prompt = request.prompt
    mode = "load" if prompt is None else "exact" if prompt.exact else "bytes"
    tokens = 0 if prompt is None else prompt.prompt_tokens
    workers = list(router.workers.values())
    if not workers:
        return Explanation(None, "there is no worker", tokens, None, mode, [])
    seen, fleet = router.compare(request, workers, now)
    candidates = [_considered(c, fleet, now) for c in seen]
    try:
        eligible = router.eligible(request.model)
    except NoWorker:
        return Explanation(None, "no worker is available", tokens, None, mode, candidates)
    able = [c for c in seen if c.worker in eligible]
    chosen = router.choose(able, fleet)
    reason = _reason(chosen, able, fleet)
    engine = chosen.worker.engine
    size = None if prompt is None else prompt.chain(engine.block_size).block_tokens
    return Explanation(chosen.worker.id, reason, tokens, size, mode, candidates)


def _considered(candidate: Candidate, fleet: Fleet, now: float) -> Considered:
    worker = candidate.worker
    ahead = worker.prefill_ahead_seconds(now)
    return Considered(
        worker=worker.id,
        available=worker.available,
        reason="" if worker.available else worker.reason or "draining",
        cached_tokens=candidate.cached_tokens,
        uncached_tokens=candidate.uncached_tokens,
        prefill_ahead_seconds=ahead,
        decode_seconds=worker.decode_seconds,
        prefill_seconds=candidate.prefill_seconds,
        delay_to_others_seconds=fleet.delays * candidate.prefill_seconds,
        cost_seconds=fleet.cost(candidate),
        recent_seconds=worker.recent_seconds(now),
    )


def _reason(chosen: Candidate, able: list[Candidate], fleet: Fleet) -> str:
    name, total = chosen.worker.id, chosen.cached_tokens + chosen.uncached_tokens
    if len(able) == 1:
        return f"worker {name} is the only one that can take it"
    others = [c for c in able if c is not chosen]
    best = min(others, key=fleet.cost)
    costs = (
        f"{fleet.cost(chosen):.3g} s against {fleet.cost(best):.3g} s on worker {best.worker.id}"
    )
    if chosen.cached_tokens > max(c.cached_tokens for c in others):
        return f"worker {name} has {chosen.cached_tokens} of {total} prompt tokens cached: {costs}"
    if fleet.cost(chosen) < fleet.cost(best):
        return f"worker {name} costs least: {costs}"
    lately, best_lately = (c.worker.recent_seconds(fleet.now) for c in (chosen, best))
    if lately < best_lately:
        return f"worker {name} costs about as little, and was given less to do lately: {costs}"
    return f"worker {name} is as good as any: {costs}"
