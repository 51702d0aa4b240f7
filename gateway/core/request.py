"""What the router is told of a request: before it is placed, and when it has ended."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core.blocks import Prompt


@dataclass(frozen=True, slots=True)
class Request:
    """What placement must know of a request; ``prompt`` is None where it could not be hashed,
    ``session`` where the client names none."""

    prompt: Prompt | None
    model: str | None = None
    max_tokens: int | None = None
    stream: bool = False
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts that the engine delivered; ``cached_tokens`` is None where it gave none."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the engine computed; 0 where it does not tell."""
        return 0 if self.cached_tokens is None else self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class Result:
    """How a request ended. ``computed`` is False where the engine cannot have computed the prompt:
    the worker was not reached, or refused the request."""

    usage: Usage | None = None
    computed: bool = True
