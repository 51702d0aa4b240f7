"""Looking at real processes."""

from __future__ import annotations

from pathlib import Path

from tests.unit.workers.fake_engine import PARTS
from tests.waiting import until

FAKE_ENGINE = str(Path(__file__).with_name("fake_engine.py"))


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def waits(pid: int) -> bool:
    """Whether a process sleeps and has no signal still to handle."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return fields["State"].split()[0] == "S" and int(fields["ShdPnd"], 16) == 0


def argument(pid: int, option: str) -> str:
    argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return argv[argv.index(option) + 1]


def guardian_of(pids: dict[str, int]) -> int:
    """The parent of the API server, while that lives."""
    stat = Path(f"/proc/{pids['api']}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def children() -> list[int]:
    """Our own, zombies included."""
    tasks = Path("/proc/self/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def engine_pids(folder: Path) -> dict[str, int]:
    """The pids of a fake engine's processes by part, once all of them run."""
    until("all parts of the engine run", lambda: all((folder / part).exists() for part in PARTS))
    return {part: int((folder / part).read_text()) for part in PARTS}


def living(pids: dict[str, int]) -> list[str]:
    return [part for part, pid in pids.items() if alive(pid)]


def until_gone(pids: dict[str, int], seconds: float = 5) -> None:
    until("no process of the engine is left", lambda: not living(pids), seconds)
