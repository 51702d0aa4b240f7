"""What other routers do, as policies of the same signature: the simulation compares with them.

Each is written from its published formula. What they count in blocks or characters is counted in
tokens here, which changes no order between workers. What a router of that kind believes to be
cached (its own capacity) is for whoever runs the policy to arrange.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.placement import Candidate, Fleet, Policy, least_work, round_robin
from gateway.core.worker import Worker

_CACHE_THRESHOLD, _BALANCE_REQUESTS, _BALANCE_RATIO = 0.3, 64, 1.5

_PREFIX_WEIGHT, _QUEUE_WEIGHT, _USAGE_WEIGHT = 3.0, 2.0, 2.0
"""llm-d's default weights of its scorers."""


def cache_aware(candidates: Sequence[Candidate], fleet: Fleet) -> Candidate:
    """vllm-router and sglang-router: the longest match if it is over 0.3 of the prompt, else the
    fewest requests in flight; those as well, cache or not, where in-flight numbers differ by more
    than 64 and by more than half."""
    loads = [c.worker.in_flight for c in candidates]
    idlest = candidates[loads.index(min(loads))]
    if max(loads) - min(loads) > _BALANCE_REQUESTS and max(loads) > _BALANCE_RATIO * min(loads):
        return idlest
    matched = max(candidates, key=lambda c: c.cached_tokens)
    total = matched.cached_tokens + matched.uncached_tokens
    return matched if matched.cached_tokens > _CACHE_THRESHOLD * total else idlest


def llm_d(candidates: Sequence[Candidate], fleet: Fleet) -> Candidate:
    """llm-d: weighted sum of scores between 0 and 1 (matched share of the prompt, short queue, free
    cache), the highest wins. Its approximate and its precise producer differ in what they believe
    to be cached, not in the score."""
    queues = [c.worker.waiting for c in candidates]
    longest, spread = max(queues), max(queues) - min(queues)

    def score(candidate: Candidate) -> float:
        worker = candidate.worker
        total = candidate.cached_tokens + candidate.uncached_tokens
        queue = (longest - worker.waiting) / spread if spread else 1.0
        return (
            _PREFIX_WEIGHT * candidate.cached_tokens / total
            + _QUEUE_WEIGHT * queue
            + _USAGE_WEIGHT * (1.0 - _cache_usage(worker))
        )

    return max(candidates, key=score)


def _cache_usage(worker: Worker) -> float:
    """Share of the cache that prompts in flight take, at most 1; 0 where its size is unknown."""
    capacity_tokens = (worker.engine.capacity_blocks or 0) * worker.engine.block_size
    return min(1.0, worker.in_flight_tokens / capacity_tokens) if capacity_tokens else 0.0


def dynamo(candidates: Sequence[Candidate], fleet: Fleet) -> Candidate:
    """NVIDIA Dynamo at temperature 0: tokens of prefill that are not done, those of the prompt
    less its match included, plus tokens that running requests hold; the least wins."""

    def cost(candidate: Candidate) -> int:
        prompt_tokens = candidate.cached_tokens + candidate.uncached_tokens
        prefill = candidate.worker.waiting_tokens + prompt_tokens - candidate.cached_tokens
        return prefill + candidate.worker.in_flight_tokens + prompt_tokens

    return min(candidates, key=cost)


def sticky(candidates: Sequence[Candidate], fleet: Fleet) -> Candidate:
    """The study's map: the longest match, however short; an unseen prompt goes to the least
    estimated prefill work."""
    longest = max(candidates, key=lambda c: c.cached_tokens)
    if longest.cached_tokens:
        return longest
    return min(candidates, key=lambda c: c.worker.prefill_ahead_seconds(fleet.now))


def random(candidates: Sequence[Candidate], fleet: Fleet) -> Candidate:
    """Any worker. The core has no chance in it: the request's number is scrambled instead, so that
    a simulation can be repeated."""
    mixed = (fleet.turn + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return candidates[(mixed ^ mixed >> 31) % len(candidates)]


BASELINES: dict[str, Policy] = {
    "cache_aware": cache_aware,
    "llm_d_approximate": llm_d,
    "llm_d_precise": llm_d,
    "dynamo": dynamo,
    "least_work": least_work,
    "round_robin": round_robin,
    "random": random,
    "sticky": sticky,
}
