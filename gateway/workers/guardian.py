"""Starts one worker's command and sees to it that nothing of it outlives the gateway.

Run as a script in a session of its own: `python -I -S guardian.py GRACE_SECONDS COMMAND...`.
It needs Linux and the standard library only: up at once, and nothing installed can break it.

- Standard input is a pipe whose other end only the gateway holds. At its end (the gateway has died
  or let go) every process of the worker is ended: SIGTERM, and SIGKILL after GRACE_SECONDS. A line
  `stop SECONDS` asks for the same with another grace, which can only bring the end nearer;
  `stop 0` is SIGKILL now.
- Standard output gets one line, `started PID`, and ends with the guardian, which alone holds it.
  Standard error is the worker's log.
- When COMMAND exits by itself, the rest of its processes is ended in the same way.
- The exit status is COMMAND's, or 128 + N after signal N. It comes only when no process is left.

vLLM's engine core and its workers survive a SIGKILL of the API server that started them, hence
all this.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_AGAIN_SECONDS = 0.05
# Python's resource tracker ends by itself once its clients are gone, and unlinks the shared memory
# that they left behind, for vLLM 400 MB of /dev/shm. So it is killed last, if it takes longer.
TRACKER_COMMAND = b"multiprocessing.resource_tracker"
TRACKER_SECONDS = 2.0
NOT_STARTED_STATUS = 127


def process_table() -> dict[int, tuple[int, int]]:
    """Parent and session of each process that is not a zombie, by pid."""
    table: dict[int, tuple[int, int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue  # it has just ended
        # pid (name) state parent group session ...; the name may hold spaces and parentheses
        state, parent, _, session = stat[stat.rindex(b")") + 2 :].split(None, 4)[:4]
        if state not in (b"Z", b"X"):
            table[int(name)] = (int(parent), int(session))
    return table


def descendants(ancestor: int) -> list[int]:
    """Living processes below `ancestor`, whatever group or session they have moved to."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in process_table().items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    generation = [ancestor]
    while generation:
        generation = [child for pid in generation for child in children.get(pid, ())]
        found += generation
    return found


def is_resource_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return TRACKER_COMMAND in file.read()
    except OSError:
        return False


def send_signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class Guardian:
    """Owns one worker's processes, from the start of its command until the last of them is gone."""

    def __init__(self, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._command: subprocess.Popen[bytes] | None = None  # dropped, it would reap the command
        self._status: int | None = None  # the command's, once it has exited
        self._kill_at: float | None = None  # time.monotonic(); None: not ending
        self._gateway_alive = True
        self._signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup)
        # Handlers, not SIG_IGN: an ignored signal would stay ignored in the command. What a
        # terminal's SIGINT and SIGHUP mean for the worker is for the gateway to say.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        # Orphans become our children: when no child is left, nothing is left.
        prctl(PR_SET_CHILD_SUBREAPER, 1)

    def start(self, command: list[str]) -> int:
        """Returns the command's pid. Raises OSError when it cannot be executed."""
        self._command = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            process_group=0,
            # Reaches the command alone, not what it starts, but even if the guardian is killed.
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        return self._command.pid

    def run(self) -> int:
        """Returns the command's exit status once no process of the worker is left."""
        assert self._command is not None
        while self._reap(self._command.pid):
            if self._status is not None:
                self._end(self._grace_seconds)
            wait_seconds = None
            if self._kill_at is not None:
                left_seconds = self._kill_at - time.monotonic()
                if left_seconds <= 0:
                    self.kill(spare_trackers=left_seconds > -TRACKER_SECONDS)
                wait_seconds = left_seconds if left_seconds > 0 else KILL_AGAIN_SECONDS
            self._wait(wait_seconds)
        assert self._status is not None
        return self._status

    def _reap(self, command_pid: int) -> bool:
        """Collects what has exited; whether any process is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == command_pid:
                code = os.waitstatus_to_exitcode(status)
                self._status = code if code >= 0 else 128 - code

    def _wait(self, seconds: float | None) -> None:
        inputs = [self._signals, *([0] if self._gateway_alive else [])]
        readable, _, _ = select.select(inputs, [], [], seconds)
        if self._signals in readable and signal.SIGTERM in os.read(self._signals, 4096):
            self._end(self._grace_seconds)
        if 0 in readable:
            self._obey()

    def _obey(self) -> None:
        orders = os.read(0, 4096)
        if not orders:
            self._gateway_alive = False
            self._end(self._grace_seconds)
        for order in orders.splitlines():
            self._end(float(order.removeprefix(b"stop ")))

    def _end(self, grace_seconds: float) -> None:
        kill_at = time.monotonic() + grace_seconds
        if self._kill_at is None:
            self._kill_at = kill_at
            if grace_seconds > 0:
                send_signal(descendants(os.getpid()), signal.SIGTERM)
        self._kill_at = min(self._kill_at, kill_at)

    def kill(self, spare_trackers: bool) -> None:
        pids = descendants(os.getpid())
        if spare_trackers:
            pids = [pid for pid in pids if not is_resource_tracker(pid)]
        send_signal(pids, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    guardian = Guardian(grace_seconds=float(arguments[0]))
    try:
        pid = guardian.start(arguments[1:])
    except OSError as error:
        print(f"cannot start {arguments[1]}: {error}", file=sys.stderr)
        return NOT_STARTED_STATUS
    try:
        os.write(1, b"started %d\n" % pid)
    except BrokenPipeError:
        pass  # the gateway is gone, which the other pipe tells too
    try:
        return guardian.run()
    finally:
        guardian.kill(spare_trackers=False)  # finds nothing, unless the guardian itself has failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
