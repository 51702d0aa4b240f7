"""One worker's processes, from the gateway's side of the guardian's pipes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.workers import guardian

LOG_LIMIT_BYTES = 16 * 1024 * 1024
LAST_LINES = 20
LAST_BYTES = 64 * 1024
LOOK_AGAIN_SECONDS = 0.05
# Of a traceback, with or without what vLLM's logger puts before each line. The frames would crowd
# out the messages: vLLM reports one failure by up to three tracebacks, the cause in the first.
TRACEBACK_FRAME = re.compile(
    r'(\([^)]* pid=\d+\) )?([A-Z]+ [\d-]+ [\d:]+ \[[^]]*\] )?(  File "| {4})'
)


class StartFailed(Exception):
    """The command could not be executed; the log says why."""


class WorkerLog:
    """The file that one worker's processes write to, over all its starts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start_bytes = 0

    def open(self) -> int:
        """Returns a descriptor. A file grown too long is set aside, in place of the last one."""
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_size > LOG_LIMIT_BYTES:
                self.path.replace(self.path.with_suffix(".log.1"))
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._start_bytes = os.fstat(descriptor).st_size
        return descriptor

    def last_lines(self) -> tuple[str, ...]:
        """The last lines written since the last `open`, without the frames of tracebacks."""
        try:
            with self.path.open("rb") as file:
                end_bytes = file.seek(0, os.SEEK_END)
                file.seek(max(self._start_bytes, end_bytes - LAST_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return ()
        told = (line for line in text.splitlines() if line and not TRACEBACK_FRAME.match(line))
        return tuple(told)[-LAST_LINES:]


@dataclass(frozen=True, slots=True)
class Command:
    """What to run, where, and the grace of its processes when the gateway or the command dies."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    grace_seconds: float


class GuardedProcess:
    """A command under a guardian. To close it, or to die, ends every process of the command.

    Not asyncio's own subprocess: that sends SIGKILL to a child, here the guardian, when its
    transport is dropped.
    """

    def __init__(self, command: Command, log: WorkerLog) -> None:
        """Raises OSError where the guardian cannot be started."""
        with contextlib.ExitStack() as opened:
            log_end = log.open()
            opened.callback(os.close, log_end)
            guardian_end, orders = os.pipe()
            opened.callback(os.close, guardian_end)
            try:
                self._guardian = subprocess.Popen(
                    [
                        *(sys.executable, "-I", "-S", guardian.__file__),
                        *(str(command.grace_seconds), *command.argv),
                    ],
                    stdin=guardian_end,
                    stdout=subprocess.PIPE,
                    stderr=log_end,
                    env=command.environment,
                    cwd=command.folder,
                    start_new_session=True,  # a terminal's Ctrl-C is for the gateway alone
                )
            except OSError:
                os.close(orders)
                raise
        self._orders: int | None = orders
        self._answers = asyncio.StreamReader()
        self._transport: asyncio.ReadTransport | None = None

    async def started(self) -> int:
        """The command's pid. Raises StartFailed."""
        protocol = asyncio.StreamReaderProtocol(self._answers)
        pipe = self._guardian.stdout
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: protocol, pipe
        )
        answer = await self._answers.readline()
        if not answer:
            await self.wait()
            raise StartFailed("the command cannot be executed")
        return int(answer.split()[1])

    async def wait(self) -> int:
        """The command's exit status, -N after signal N, once no process of it is left."""
        await self._answers.read()  # to the end: the guardian has exited
        status = self._guardian.wait()
        if status < 0:  # it was killed, and what it guarded may live on
            while left := session_processes(self._guardian.pid):
                guardian.send_signal(left, signal.SIGKILL)
                await asyncio.sleep(LOOK_AGAIN_SECONDS)
        signalled = 128 < status < 128 + signal.NSIG
        return 128 - status if signalled else status

    def stop(self, grace_seconds: float) -> None:
        """Asks for the end within `grace_seconds`; 0 is SIGKILL. `wait` tells when it is done."""
        if self._orders is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended already
                os.write(self._orders, b"stop %f\n" % grace_seconds)

    def close(self) -> None:
        if self._orders is not None:
            os.close(self._orders)
            self._orders = None
        if self._transport is not None:
            self._transport.close()
        elif self._guardian.stdout is not None:
            self._guardian.stdout.close()


def session_processes(session: int) -> list[int]:
    """Living processes of the session that a guardian led."""
    return [pid for pid, (_, own) in guardian.process_table().items() if own == session]


def orphans(folder: Path) -> list[int]:
    """Living processes that run in `folder`, as ours do, and whose guardian is gone."""
    table = guardian.process_table()
    found = []
    for pid, (_, session) in table.items():
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if session not in table and os.readlink(f"/proc/{pid}/cwd") == str(folder):
                found.append(pid)
    return sorted(found)
