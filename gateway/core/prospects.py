"""What each worker would mean for one prompt: the material that policies decide by."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from gateway.core.blocks import EMPTY_CHAIN, BlockHash
from gateway.core.caches import Caches
from gateway.core.placement import Candidate
from gateway.core.request import Request
from gateway.core.worker import Worker

_cached_tokens = itemgetter(Candidate._fields.index("cached_tokens"))


def prospect(caches: Caches, worker: Worker, request: Request, now: float) -> Candidate:
    if request.prompt is None:
        chain, prompt_tokens = EMPTY_CHAIN, 1
    else:
        chain = request.prompt.chain(worker.engine.block_size)
        prompt_tokens = chain.prompt_tokens
    prediction = caches.predict(worker, chain)
    cached = prediction.blocks * chain.block_tokens
    uncached = prompt_tokens - cached
    prefill = worker.estimates.prefill.seconds(uncached, cached)
    pending = worker.pending_seconds(now)
    return Candidate(worker, cached, uncached, prefill, pending, prediction)


def longest_match(request: Request, candidates: Sequence[Candidate]) -> BlockHash | None:
    """The last block of the prompt that any candidate holds."""
    longest = max(candidates, key=_cached_tokens)
    if request.prompt is None or not longest.cached_tokens:
        return None
    chain = request.prompt.chain(longest.worker.engine.block_size)
    return chain.hashes[longest.cached_tokens // chain.block_tokens - 1]
