"""Processes that measurements start: which core they run on, what they use, how they end."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.bench.figures import CannotMeasure
from tests.gateway_process import REPOSITORY, GatewayProcess

ALLOWED_CORES = sorted(os.sched_getaffinity(0))
MIB = 1024 * 1024
STOP_SECONDS = 8
SETTINGS = "GATEWAY_"
RESIDENT = re.compile(r"VmRSS:\s+(\d+) kB")


def gateway_core() -> int:
    """The gateway has this core to itself; raises CannotMeasure where there is no second one."""
    if len(ALLOWED_CORES) < 2:
        raise CannotMeasure("two cores are needed: one for the gateway, one for its load")
    return ALLOWED_CORES[0]


def load_core() -> int:
    """Workers and load generators share this one."""
    gateway_core()
    return ALLOWED_CORES[1]


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """What is started inside runs on ``core`` from its first instruction on."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def allow_descriptors(count: int) -> None:
    """For this process and those it starts; raises CannotMeasure where the hard limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= count:
        return
    if hard < count:
        raise CannotMeasure(f"{count} file descriptors are needed (ulimit -Hn is {hard})")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def plain_environment() -> dict[str, str]:
    """Ours, without the settings and the proxies that a gateway would take from it."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(SETTINGS) and not name.lower().endswith("_proxy")
    }


def free_ports(count: int) -> list[int]:
    """Different ones, free a moment ago."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def end(process: subprocess.Popen[Any]) -> None:
    """SIGTERM to the whole session that it leads, and SIGKILL to what is left of it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(STOP_SECONDS)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait(STOP_SECONDS)


@contextmanager
def stub_workers(*arguments: str) -> Iterator[list[str]]:
    """Two stub workers on the load's core; their URLs."""
    command = [sys.executable, "-m", "tests.bench.stub_worker", *arguments]
    with ExitStack() as stack:
        urls = []
        for _ in range(2):
            with on_core(load_core()):
                process = subprocess.Popen(
                    command, cwd=REPOSITORY, stdout=subprocess.PIPE, start_new_session=True
                )
            stack.callback(end, process)
            assert process.stdout is not None
            stack.enter_context(process.stdout)
            port = process.stdout.readline()
            assert port, "a stub worker ended before it listened"
            urls.append(f"http://127.0.0.1:{int(port)}")
        yield urls


@contextmanager
def our_gateway(folder: Path, workers: Sequence[str]) -> Iterator[GatewayProcess]:
    """Ours as a user starts it, on its own core, with both workers taken up."""
    with on_core(gateway_core()):
        gateway = GatewayProcess(folder, workers, ["--log-level", "warning"])
    try:
        gateway.wait_ready()
        gateway.wait_up(len(workers))
        yield gateway
    finally:
        gateway.stop()


def run_client(module: str, *arguments: object, seconds: float) -> dict[str, Any]:
    """A load client of this package in a process of its own, on the load's core; its report."""
    command = [sys.executable, "-m", f"tests.bench.{module}", *map(str, arguments)]
    with on_core(load_core()):
        process = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
    try:
        out, _ = process.communicate(timeout=seconds)
    finally:
        end(process)
    assert process.returncode == 0, f"{module} ended with {process.returncode}"
    report: dict[str, Any] = json.loads(out)
    return report


def tree(pid: int) -> list[int]:
    """The process and all it has started that is still there."""
    found, todo = [], [pid]
    while todo:
        each = todo.pop()
        found.append(each)
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            todo += [int(child) for child in children.read_text().split()]
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of the whole tree, to the nanosecond.

    /proc/PID/stat counts in hundredths, which is coarse beside a stream's load. The clock's number
    is what clock_getcpuclockid(3) makes of a pid.
    """
    return sum(time.clock_gettime((~each << 3) | 2) for each in tree(pid))


def resident_mib(pid: int) -> float:
    """Of the whole tree; what its processes share is counted for each."""
    total_kib = 0
    for each in tree(pid):
        found = RESIDENT.search(Path(f"/proc/{each}/status").read_text())
        total_kib += int(found[1]) if found else 0
    return total_kib / 1024
