from __future__ import annotations

import asyncio
import io

from gateway.core.request import Usage
from gateway.core.reservation import Cost, WorkerId
from gateway.observe.journal import Journal
from gateway.observe.record import Outcome, Record


def ended(number: int) -> Record:
    return Record(
        10.0,
        "chat",
        b"id-%d" % number,
        outcome=Outcome.OK,
        worker="0",
        first_byte_at=10.5,
        predicted_cached_tokens=32,
        costs=[Cost(WorkerId("0"), 0.25), Cost(WorkerId("1"), 1.5)],
        usage=Usage(100, 7, 48),
    )


def test_lines_are_written_together_and_none_is_lost() -> None:
    async def main() -> io.StringIO:
        lines = io.StringIO()
        journal = Journal(lines)
        for number in range(50):
            journal.request_ended(ended(number), 11.0)
        assert lines.getvalue() == ""
        journal.flush()
        journal.flush()
        return lines

    lines = asyncio.run(main()).getvalue().splitlines()
    assert [line.split(" id=")[1].split(" ")[0] for line in lines] == [f"id-{n}" for n in range(50)]
    assert lines[0].partition(" INFO request: ")[2] == (
        "id=id-0 endpoint=chat outcome=ok seconds=1.0000 first_byte_seconds=0.5000 worker=0 "
        "predicted_tokens=32 prompt_tokens=100 delivered_tokens=48 completion_tokens=7 "
        "cost_seconds=0:0.2500,1:1.5000"
    )


def test_what_is_not_known_is_left_out() -> None:
    async def main() -> str:
        lines = io.StringIO()
        journal = Journal(lines)
        journal.request_ended(Record(0.0, outcome=Outcome.CLIENT_GONE, fallback="unparsed"), 2.0)
        journal.flush()
        return lines.getvalue()

    assert asyncio.run(main()).endswith("outcome=client_gone seconds=2.0000 fallback=unparsed\n")


def test_they_come_by_themselves_and_where_nobody_wants_them_nothing_is_kept() -> None:
    class Lines(io.StringIO):
        def flush(self) -> None:
            written.set()

    async def main() -> None:
        journal = Journal(lines)
        journal.request_ended(ended(1), 11.0)
        async with asyncio.timeout(5):
            await written.wait()
        silent = Journal(None)
        silent.request_ended(ended(2), 11.0)
        silent.flush()

    written, lines = asyncio.Event(), Lines()
    asyncio.run(main())
    assert lines.getvalue().count("\n") == 1
