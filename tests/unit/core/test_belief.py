from __future__ import annotations

import pytest

from gateway.core.belief import Belief, Delivered

NEW, OLD = 0.01, 0.8


class Told:
    """A belief, told of one prompt after the other; each is a use of its own."""

    def __init__(self) -> None:
        self.belief = Belief()
        self.use = 0
        for _ in range(10):
            self.tell(0, 0)

    def tell(
        self, predicted: int, found: int, age: float = NEW, before: int | None = None
    ) -> int | None:
        """``before``: by default the first use of all."""
        self.use += 1
        use = 1 if before is None else before
        return self.belief.judge(Delivered(predicted, found, age, use, self.use))


def test_right_predictions_change_nothing() -> None:
    told = Told()
    assert [told.tell(1000, found) for found in (1000, 990, 600, 4000)] == [None] * 4
    assert told.belief.share == 1.0


def test_prompts_seen_a_moment_ago_and_not_found_mean_that_all_is_lost() -> None:
    told = Told()
    assert told.tell(1000, 0) is None
    first = told.use
    assert told.tell(500, 16) is None
    assert told.tell(800, 0) == first, "what was stored since may well be there"
    assert told.belief.share == 1.0


def test_one_that_is_found_clears_the_others() -> None:
    told = Told()
    for _ in range(5):
        told.tell(1000, 0)
        told.tell(1000, 0)
        assert told.tell(1000, 1000) is None


def test_what_was_computed_since_the_first_miss_clears_nothing() -> None:
    told = Told()
    told.tell(1000, 0)
    since = told.use
    told.tell(1000, 0)
    assert told.tell(1000, 1000, before=since) is None
    assert told.tell(1000, 0) is not None


def test_what_nobody_has_answered_yet_proves_nothing() -> None:
    """Equal prompts together: whether the second finds the first's blocks is left open."""
    told = Told()
    assert [told.tell(1000, 0, before=told.use + 5) for _ in range(6)] == [None] * 6


def test_old_prompts_that_are_gone_shrink_what_counts_and_lose_nothing() -> None:
    told = Told()
    assert [told.tell(1000, 0, OLD) for _ in range(5)] == [None] * 5
    assert told.belief.share == pytest.approx(0.95**5)
    for _ in range(200):
        told.tell(1000, 0, OLD)
    assert told.belief.share == pytest.approx(0.05)


def test_old_prompts_that_are_found_let_it_grow_again() -> None:
    told = Told()
    for _ in range(20):
        told.tell(1000, 500, OLD)
    shrunk = told.belief.share
    for _ in range(40):
        told.tell(1000, 1000, OLD)
    assert shrunk < told.belief.share <= 1.0
    for _ in range(400):
        told.tell(1000, 1000, OLD)
    assert told.belief.share == 1.0


def test_a_new_generation_is_not_suspected() -> None:
    told = Told()
    told.tell(1000, 0)
    told.tell(1000, 0)
    told.belief.renew()
    assert told.tell(1000, 0) is None
