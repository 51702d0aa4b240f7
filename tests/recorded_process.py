"""A Python process of its own that records its GC pauses and runs what a test tells it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parent.parent

# Collections happen only where a test asks for one, so counts are exact.
_DRIVER = """
import gc, json, os, sys, threading
gc.disable()
from gateway.engine import gc_pauses
names = dict(globals())
for line in sys.stdin:
    exec(json.loads(line), names)
    print("done", flush=True)
"""


def environment(folder: Path | None) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if key != "GATEWAY_GC_DIR"}
    own = {} if folder is None else {"GATEWAY_GC_DIR": str(folder)}
    return {**inherited, **own, "PYTHONPATH": str(ROOT)}


class RecordedProcess:
    """Begins to record on entry, if it is given a folder; ends on exit, its errors in `stderr`."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.stderr = ""

    def __enter__(self) -> RecordedProcess:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _DRIVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(self._folder),
        )
        self.run("gc_pauses.register()")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stderr = self._process.communicate()[1]

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, statements: str) -> None:
        """Run these in the process and return when they are done."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(statements), file=self._process.stdin, flush=True)
        if self._process.stdout.readline() != "done\n":
            raise AssertionError(f"the process ended: {self._process.communicate()[1]}")

    def kill_unreaped(self) -> None:
        """Kill it and leave it a zombie until exit."""
        self._process.kill()
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
