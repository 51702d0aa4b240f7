from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.event_order import MOST_WAITING, Batch, EventOrder, Step


def batch(number: int, at: float | None = None) -> Batch:
    return Batch(number, float(number) if at is None else at, ())


def numbers(steps: list[Batch | Step]) -> list[int | str]:
    return [step.number if isinstance(step, Batch) else step.value for step in steps]


def test_in_order_each_is_handed_out_at_once() -> None:
    order = EventOrder(replays=True)
    assert numbers(order.join()) == ["ask"]
    assert numbers(order.replay_ended()) == ["complete"]
    assert numbers(order.live(batch(0)) + order.live(batch(1))) == [0, 1]
    assert (order.gaps, order.replays, order.behind) == (0, 1, False)


def test_what_came_before_us_is_replayed_and_no_gap() -> None:
    order = EventOrder(replays=True)
    order.join()
    assert numbers(order.live(batch(2))) == []
    assert numbers(order.replayed(batch(0)) + order.replayed(batch(1))) == [0, 1, 2]
    assert numbers(order.replayed(batch(2)) + order.replay_ended()) == ["complete"]
    assert order.gaps == 0


def test_a_gap_is_replayed() -> None:
    order = EventOrder(replays=True)
    order.join()
    order.replay_ended()
    assert numbers(order.live(batch(0)) + order.live(batch(3))) == [0, "ask"]
    assert order.next == 1 and order.behind
    assert numbers(order.live(batch(4))) == []
    assert numbers(order.replayed(batch(1)) + order.replayed(batch(2))) == [1, 2, 3, 4]
    assert numbers(order.replay_ended()) == ["complete"]
    assert (order.gaps, order.replays) == (1, 2)


def test_a_gap_that_the_replay_does_not_close_loses_all() -> None:
    order = EventOrder(replays=True)
    order.live(batch(0))
    order.live(batch(3))
    assert numbers(order.replay_ended()) == ["lost", 3]
    assert numbers(order.live(batch(4))) == [4]


def test_without_replays_a_gap_loses_at_once() -> None:
    order = EventOrder(replays=False)
    assert order.join() == []
    assert numbers(order.live(batch(7)) + order.live(batch(8))) == ["lost", 7, 8]
    assert numbers(order.live(batch(10))) == ["lost", 10]
    assert (order.gaps, order.replays) == (2, 0)


def test_a_replay_with_a_hole_is_asked_for_again_from_there() -> None:
    order = EventOrder(replays=True)
    order.join()
    assert numbers(order.replayed(batch(0)) + order.replayed(batch(2))) == [0]
    assert numbers(order.replay_ended()) == ["ask"] and order.next == 1
    assert numbers(order.replayed(batch(1))) == [1, 2]
    assert numbers(order.replay_ended()) == ["complete"]


def test_a_replay_that_begins_late_is_better_than_nothing() -> None:
    order = EventOrder(replays=True)
    order.join()
    order.replayed(batch(5))
    order.replayed(batch(6))
    assert numbers(order.replay_ended()) == ["lost", 5, 6]
    assert numbers(order.live(batch(7))) == [7]


def test_late_and_twice_is_no_restart() -> None:
    order = EventOrder(replays=False)
    for number in range(3):
        order.live(batch(number))
    assert order.live(batch(1)) == order.live(batch(2)) == []


def test_numbers_that_begin_anew_are_another_engine() -> None:
    order = EventOrder(replays=True)
    for number in range(3):
        order.live(batch(number))
    assert numbers(order.live(batch(0, at=100))) == ["restarted", 0]
    assert numbers(order.live(batch(1, at=101))) == [1]
    assert numbers(order.live(batch(1, at=200))) == ["restarted", "ask"]
    assert order.next == 0
    assert numbers(order.replayed(batch(0, at=199))) == [0, 1]


def test_a_replay_of_other_batches_than_ours_is_another_engines() -> None:
    order = EventOrder(replays=True)
    order.join()
    order.replay_ended()
    for number in range(3):
        order.live(batch(number))
    assert numbers(order.live(batch(4, at=104))) == ["ask"] and order.ask_from == 2
    assert numbers(order.replayed(batch(2, at=102))) == ["restarted", "ask"]
    assert order.ask_from == 0
    assert numbers(order.replayed(batch(3, at=103)) + order.replay_ended()) == []
    steps = [step for number in range(5) for step in order.replayed(batch(number, at=100 + number))]
    assert numbers(steps + order.replay_ended()) == [0, 1, 2, 3, 4, "complete"]


def test_what_waits_is_bounded() -> None:
    order = EventOrder(replays=True)
    order.join()
    steps: list[Batch | Step] = []
    for number in range(1, MOST_WAITING + 2):
        steps += order.live(batch(number))
    assert numbers(steps[:2]) == ["lost", 1]
    assert len(steps) == MOST_WAITING + 2 and not order.behind


@given(
    st.integers(1, 12),
    st.sets(st.integers(0, 11)),
    st.sets(st.integers(0, 11)),
    st.lists(st.integers(0, 11), max_size=6),
    st.booleans(),
)
def test_any_loss(
    published: int, lost_live: set[int], lost_for_good: set[int], twice: list[int], replays: bool
) -> None:
    """Between two losses what is handed out has no hole; with all to be replayed none is lost."""
    order = EventOrder(replays)
    handed: list[int | str] = []
    asked: deque[int] = deque()

    def take(steps: list[Batch | Step]) -> None:
        handed.extend(numbers(steps))
        asked.extend(order.ask_from for step in steps if step is Step.ASK)

    take(order.join())
    for number in range(published):
        if number not in lost_live:
            take(order.live(batch(number)))
        for again in twice:
            if again < number and again not in lost_live:
                take(order.live(batch(again)))
        while asked:
            start = asked.popleft()
            for old in range(start, number + 1):
                if old not in lost_for_good:
                    take(order.replayed(batch(old)))
            take(order.replay_ended())
    position, lost = 0, 0
    for step in handed:
        if isinstance(step, int):
            assert step == position or (lost and step > position)
            position, lost = step + 1, 0
        lost = lost or step == "lost"
    if replays and not lost_for_good & lost_live and not lost_for_good & {0}:
        assert "lost" not in handed
        assert [n for n in handed if isinstance(n, int)] == list(range(order.next))
    assert not order.behind
