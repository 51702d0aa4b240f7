"""Placement policies: functions of one signature that choose among the available workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gateway.core.blocks import BlockHash
from gateway.core.prediction import UNKNOWN, Prediction
from gateway.core.reservation import WorkerId
from gateway.core.worker import Worker

_TIE = 0.03
"""Costs that differ by less than this share of the prompt's whole prefill are equal: the least
recently charged worker should take its turn. Ties of a tenth, as there were while workers had fits
of their own, cost hits."""


_MEANWHILE = 0.5
"""Requests per worker that come while a prefill is computed, and are delayed by it too. None are
expected where nobody waits."""


class Candidate(NamedTuple):
    """One available worker as one prompt sees it; times in seconds.

    A named tuple because one is made for each worker and request: it costs a third of a dataclass.
    """

    worker: Worker
    cached_tokens: int
    uncached_tokens: int
    prefill_seconds: float
    pending_seconds: float
    prediction: Prediction = UNKNOWN


class Fleet(NamedTuple):
    """What a policy may know beside the candidates.

    ``waiting_mean``: requests per worker that wait for their first token, but for those that wait
    with the same prefix: they gain by a further copy of it. ``turn``: requests admitted so
    far. ``social_weight``: how much a recomputed prefix is charged for each of them.
    ``whole_prefill_seconds``: the prompt's prefill where nothing of it is cached. ``now``: seconds.
    ``home``: where the session of the request was last, if no worker has any of the prompt.
    ``prefix``: the last block of the prompt that any candidate holds.
    """

    waiting_mean: float
    turn: int
    social_weight: float
    whole_prefill_seconds: float
    now: float
    home: WorkerId | None = None
    prefix: BlockHash | None = None

    @property
    def delays(self) -> float:
        """How many requests a prefill is charged for beside its own."""
        if not self.waiting_mean:
            return 0.0
        return self.social_weight * (self.waiting_mean + _MEANWHILE)

    def costs(self, candidates: Sequence[Candidate]) -> list[float]:
        """Seconds that placing the prompt on each costs it and the others."""
        charge = 1.0 + self.delays
        return [c.pending_seconds + charge * c.prefill_seconds for c in candidates]

    def cost(self, candidate: Candidate) -> float:
        return self.costs((candidate,))[0]


Policy = Callable[[Sequence[Candidate], Fleet], Candidate]


def prefix_affinity(candidates: Sequence[Candidate], fleet: Fleet) -> Candidate:
    """Soonest first token, counting what the placement costs the others.

    ``cost(w) = pending(w) + (1 + k*(q + 1/2)) * prefill(uncached(prompt, w))``. Idle, that is the
    soonest first token (no charge but its own); while anyone waits, recomputing a prefix elsewhere
    is charged to all whom it delays, so the caches guard themselves. Whoever waits with the same
    prefix is not in ``q``: else a burst that shares one would stay on one worker, each request that
    waits there making a copy elsewhere dearer. So a hot prefix spills when that is cheaper.
    """
    return _least(candidates, fleet.costs(candidates), fleet)


def least_work(candidates: Sequence[Candidate], fleet: Fleet) -> Candidate:
    """Least unfinished work, whatever is cached."""
    return _least(candidates, [c.pending_seconds for c in candidates], fleet)


def round_robin(candidates: Sequence[Candidate], fleet: Fleet) -> Candidate:
    """Each in turn: the control that affinity is measured against."""
    return candidates[fleet.turn % len(candidates)]


def _least(candidates: Sequence[Candidate], costs: Sequence[float], fleet: Fleet) -> Candidate:
    limit = min(costs) + _TIE * fleet.whole_prefill_seconds
    tied = [c for c, cost in zip(candidates, costs, strict=True) if cost <= limit]
    if len(tied) == 1:
        return tied[0]
    home = next((c for c in tied if c.worker.id == fleet.home), None)
    return home or min(tied, key=lambda c: (c.worker.recent_seconds(fleet.now), c.worker.in_flight))


POLICIES: dict[str, Policy] = {
    "prefix_affinity": prefix_affinity,
    "least_work": least_work,
    "round_robin": round_robin,
}
