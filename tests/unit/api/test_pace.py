from __future__ import annotations

import asyncio
import itertools

from gateway.api.pace import _EACH_TURN, Pace
from tests.unit.loopback import run


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_few_begin_at_once_and_in_every_turn() -> None:
    async def main() -> None:
        pace, loop = Pace(), asyncio.get_running_loop()
        begun: list[int] = []
        for turn in range(5):
            for number in range(_EACH_TURN):
                pace.begin(loop, lambda n=turn * _EACH_TURN + number: begun.append(n))  # type: ignore[misc]
            assert begun == list(range((turn + 1) * _EACH_TURN))
            await turns(1)

    run(main())


def test_many_begin_in_order_and_so_many_a_turn() -> None:
    async def main() -> None:
        pace, loop = Pace(), asyncio.get_running_loop()
        begun: list[int] = []
        many = 10 * _EACH_TURN + 3
        for number in range(many):
            pace.begin(loop, lambda n=number: begun.append(n))  # type: ignore[misc]
        seen = [len(begun)]
        while len(begun) < many:
            await turns(1)
            seen.append(len(begun))
        assert begun == list(range(many))
        assert all(later - sooner <= _EACH_TURN for sooner, later in itertools.pairwise(seen))
        await turns(2)
        pace.begin(loop, lambda: begun.append(many))
        assert begun[-1] == many, "the pace is free again"

    run(main())


def test_who_comes_meanwhile_is_behind_those_who_wait() -> None:
    async def main() -> None:
        pace, loop = Pace(), asyncio.get_running_loop()
        begun: list[str] = []
        for _ in range(3 * _EACH_TURN):
            pace.begin(loop, lambda: begun.append("early"))
        await turns(1)
        pace.begin(loop, lambda: begun.append("late"))
        await turns(4)
        assert begun == ["early"] * (3 * _EACH_TURN) + ["late"]

    run(main())
