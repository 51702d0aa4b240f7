"""What a router is told when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core.cost import GPU_SPEED, Speed
from gateway.core.placement import Policy


@dataclass(frozen=True, slots=True)
class Options:
    """``social_weight`` is k of the placement rule; ``max_index_blocks`` bounds the whole index;
    ``shadow`` is a second policy that only tells where it would have placed each request."""

    policy: Policy
    shadow: Policy | None = None
    social_weight: float = 6.0
    max_index_blocks: int = 4_000_000
    speed: Speed = GPU_SPEED
    default_capacity_blocks: int = 16_384
