from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.workers import guardian as guardian_module
from tests.unit.workers.processes import (
    FAKE_ENGINE,
    alive,
    engine_pids,
    living,
    until_gone,
    waits,
)
from tests.waiting import until

LONG_SECONDS = 60.0
SOON_SECONDS = 5.0


@dataclass
class Guarded:
    """A guardian over a command, and the pids that the command has reported in `folder`."""

    process: subprocess.Popen[bytes]
    folder: Path

    def order(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.flush()

    def let_go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def status(self) -> int:
        return self.process.wait(SOON_SECONDS)

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()


class Starter:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.started: list[Guarded] = []

    def command(self, *command: str, grace_seconds: float, stdin: int = subprocess.PIPE) -> Guarded:
        process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", guardian_module.__file__),
                *(str(grace_seconds), *command),
            ],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "GATEWAY_GC_DIR": str(self._folder)},
            start_new_session=True,
        )
        guarded = Guarded(process, self._folder)
        self.started.append(guarded)
        return guarded

    def engine(self, traits: str = "", grace_seconds: float = LONG_SECONDS) -> Guarded:
        return self.command(sys.executable, FAKE_ENGINE, traits, grace_seconds=grace_seconds)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    for guarded in starter.started:
        with guarded.process as process:
            if process.stdin is not None and not process.stdin.closed:
                process.stdin.close()
            process.terminate()
            process.wait(SOON_SECONDS)


@pytest.mark.parametrize("traits", ["", "leaving"])
def test_end_of_the_pipe_ends_every_process(start: Starter, traits: str) -> None:
    guarded = start.engine(traits)
    pids = engine_pids(guarded.folder)
    guarded.let_go()
    assert guarded.status() == 128 + signal.SIGTERM
    assert living(pids) == []


def test_end_of_the_pipe_before_the_command_runs(start: Starter) -> None:
    command = [sys.executable, FAKE_ENGINE, ""]
    guarded = start.command(*command, grace_seconds=LONG_SECONDS, stdin=subprocess.DEVNULL)
    assert guarded.status() == 128 + signal.SIGTERM


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(start: Starter) -> None:
    guarded = start.engine("stubborn,leaving", grace_seconds=0.3)
    pids = engine_pids(guarded.folder)
    let_go_at = time.monotonic()
    guarded.let_go()
    assert guarded.status() == 128 + signal.SIGKILL
    assert time.monotonic() - let_go_at >= 0.3
    assert living(pids) == []


@pytest.mark.parametrize("orders", [[b"stop 0\n"], [b"stop 60\n", b"stop 0\n"]])
def test_stop_0_kills_at_once(start: Starter, orders: list[bytes]) -> None:
    guarded = start.engine("stubborn")
    pids = engine_pids(guarded.folder)
    for order in orders:
        guarded.order(order)
    assert guarded.status() == 128 + signal.SIGKILL
    assert living(pids) == []


def test_an_order_does_not_lengthen_a_grace(start: Starter) -> None:
    guarded = start.engine("stubborn")
    pids = engine_pids(guarded.folder)
    guarded.order(b"stop 0.1\n")
    guarded.order(b"stop 60\n")
    guarded.let_go()
    assert guarded.status() == 128 + signal.SIGKILL
    assert living(pids) == []


def test_sigterm_to_the_guardian_ends_every_process(start: Starter) -> None:
    guarded = start.engine()
    pids = engine_pids(guarded.folder)
    guarded.process.terminate()
    assert guarded.status() == 128 + signal.SIGTERM
    assert living(pids) == []


def test_sigint_and_sighup_mean_nothing(start: Starter) -> None:
    guarded = start.engine()
    pids = engine_pids(guarded.folder)
    guarded.process.send_signal(signal.SIGINT)
    guarded.process.send_signal(signal.SIGHUP)
    until("the guardian waits again", lambda: waits(guarded.process.pid))
    guarded.order(b"stop 0\n")
    assert guarded.status() == 128 + signal.SIGKILL  # not SIGTERM, which would have come first
    assert living(pids) == []


@pytest.mark.parametrize("traits", ["", "leaving", "stubborn"])
def test_when_the_command_is_killed_the_rest_is_ended(start: Starter, traits: str) -> None:
    guarded = start.engine(traits, grace_seconds=0.2)
    pids = engine_pids(guarded.folder)
    os.kill(pids["api"], signal.SIGKILL)
    assert guarded.status() == 128 + signal.SIGKILL
    assert living(pids) == []


def test_the_command_s_status_is_given_on_when_nothing_is_left(start: Starter) -> None:
    guarded = start.engine("exit=3")
    pids = engine_pids(guarded.folder)
    assert guarded.status() == 3
    assert living(pids) == []
    assert guarded.errors().splitlines() == [f"line {n} of {pids['api']}" for n in range(3)]


def test_the_status_of_a_command_that_exits_at_once(start: Starter) -> None:
    for status in range(10):
        guarded = start.command("/bin/sh", "-c", f"exit {status}", grace_seconds=LONG_SECONDS)
        assert guarded.status() == status


def test_the_command_s_pid_is_reported(start: Starter) -> None:
    guarded = start.engine()
    assert guarded.process.stdout is not None
    line = guarded.process.stdout.readline()
    assert line == b"started %d\n" % engine_pids(guarded.folder)["api"]


def test_the_end_of_the_guardian_is_the_end_of_its_output(start: Starter) -> None:
    guarded = start.engine()
    pids = engine_pids(guarded.folder)
    guarded.process.kill()
    assert guarded.process.stdout is not None
    guarded.process.stdout.read()  # returns although the core and the worker still live
    guarded.process.wait(SOON_SECONDS)
    until("the command dies with its guardian", lambda: not alive(pids["api"]))
    assert living(pids) == ["core", "worker"]
    for part in ("core", "worker"):
        os.kill(pids[part], signal.SIGKILL)
    until_gone(pids)


def test_a_guardian_that_fails_leaves_nothing(start: Starter) -> None:
    guarded = start.engine("stubborn,leaving")
    pids = engine_pids(guarded.folder)
    guarded.order(b"no such order\n")
    assert guarded.status() == 1
    until_gone(pids)
    assert "no such order" in guarded.errors()


def test_a_command_that_cannot_be_executed(start: Starter) -> None:
    guarded = start.command("/nowhere/at/all", grace_seconds=LONG_SECONDS)
    assert guarded.status() == guardian_module.NOT_STARTED_STATUS
    assert "cannot start /nowhere/at/all" in guarded.errors()


def test_the_command_starts_with_no_signal_ignored_and_in_a_group_of_its_own(
    start: Starter,
) -> None:
    script = "import os; print(open('/proc/self/status').read(), 'group', os.getpgrp())"
    guarded = start.command(sys.executable, "-c", script, grace_seconds=LONG_SECONDS)
    assert guarded.process.stdout is not None
    pid = int(guarded.process.stdout.readline().split()[1])
    assert guarded.status() == 0
    told = guarded.errors()
    fields = dict(line.split(":", 1) for line in told.splitlines() if ":" in line)
    ignored = int(fields["SigIgn"], 16)
    assert not ignored & (1 << signal.SIGINT - 1 | 1 << signal.SIGTERM - 1 | 1 << signal.SIGHUP - 1)
    assert f"group {pid}" in told


def test_shared_memory_of_killed_processes_is_unlinked(start: Starter, tmp_path: Path) -> None:
    script = """
        import pathlib, signal, sys
        from multiprocessing.shared_memory import SharedMemory
        memory = SharedMemory(create=True, size=4096)
        new = pathlib.Path(sys.argv[1]).with_suffix(".new")
        new.write_text(memory.name)
        new.rename(sys.argv[1])
        signal.pause()
    """
    name_file = tmp_path / "name"
    guarded = start.command(
        *(sys.executable, "-c", textwrap.dedent(script), str(name_file)),
        grace_seconds=LONG_SECONDS,
    )
    until("the memory is there", name_file.exists)
    memory = Path("/dev/shm") / name_file.read_text()
    assert memory.exists()
    guarded.order(b"stop 0\n")
    assert guarded.status() == 128 + signal.SIGKILL
    assert not memory.exists()
