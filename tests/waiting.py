"""Bounded waiting for what gives no event of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
POLL_SECONDS = 0.01


def until(what: str, condition: Callable[[], T], seconds: float = 5) -> T:
    """The first true value of `condition`; AssertionError naming `what` and the last value seen."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what} (last seen: {value!r})")
        time.sleep(POLL_SECONDS)
    return value
