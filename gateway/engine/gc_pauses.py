"""Counts the garbage collector's pauses of one process where another process can read them.

``register`` is the entry point (group ``vllm.general_plugins``) that runs in every vLLM process;
the gateway uses ``PauseRecorder`` for itself. Standard library only: this is imported into vLLM's
environment.

A hook in ``gc.callbacks`` runs wherever a collection happened to start: inside an allocation, with
any lock held, in any thread. So it only does integer arithmetic on memory laid out beforehand. It
creates no object that the collector tracks (that could start the next collection), takes no lock
and touches no metrics library (whose lock the interrupted code may hold). The interpreter runs one
collection at a time, callbacks included, so there is one writer at any moment and no lost update.

A pause file is ``<folder>/<pid>.gc``: ``HEADER`` (magic, layout version, pid, start of the process
in clock ticks after boot, role), then for each generation ``GENERATION_WORDS`` native unsigned
64-bit words: a count per bucket (not cumulative), then the sum and the longest of all pauses in
nanoseconds. A pause longer than the last bound is in the last bucket. There is no total, which
could disagree with the buckets: it is their sum.
"""

from __future__ import annotations

import atexit
import gc
import logging
import mmap
import multiprocessing
import multiprocessing.util
import os
import re
import struct
import sys
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from time import perf_counter_ns

FOLDER_VARIABLE = "GATEWAY_GC_DIR"
FILE_SUFFIX = ".gc"

GENERATIONS = 3
# 50 us to 10 s; a young collection takes tens of microseconds, a full one of a large heap seconds.
BOUNDS_NS = (
    *(50_000, 100_000, 250_000, 500_000),
    *(1_000_000, 2_500_000, 5_000_000, 10_000_000, 25_000_000, 50_000_000),
    *(100_000_000, 250_000_000, 500_000_000),
    *(1_000_000_000, 2_500_000_000, 5_000_000_000, 10_000_000_000),
)
BUCKETS = len(BOUNDS_NS) + 1
GENERATION_WORDS = BUCKETS + 2

# The version changes with the bounds and whatever else the layout fixes: a reader refuses others.
MAGIC = b"gw-gcpau"
LAYOUT_VERSION = 1
HEADER = struct.Struct("=8sIIQ40s")
COUNTERS_BYTES = GENERATIONS * GENERATION_WORDS * 8
FILE_BYTES = HEADER.size + COUNTERS_BYTES

UNKNOWN_ROLE = "other"
_ROLE_OF_NAME = {
    "EngineCore": "engine_core",
    "VllmWorker": "worker",
    "ApiServer": "api_server",
    "VLLM_DP_Coordinator": "dp_coordinator",
}
_VLLM_NAME = re.compile(rf"({'|'.join(_ROLE_OF_NAME)})(?:[_-](?:DP)?([0-9]+))?")

_logger = logging.getLogger(__name__)
_registered = False


class PauseRecorder:
    """The hook of one process, and the counters that it writes.

    ``counters`` holds ``COUNTERS_BYTES`` bytes, zeroed. Nothing is recorded before ``install``.
    """

    __slots__ = ("__weakref__", "_counters", "_pid", "_started_ns")

    def __init__(self, counters: memoryview) -> None:
        self._started_ns = perf_counter_ns()
        self.move_to(counters)

    def move_to(self, counters: memoryview) -> None:
        """Write here from now on. A forked child records nothing until it has called this."""
        self._counters = counters.cast("Q")
        self._pid = os.getpid()

    def install(self) -> None:
        gc.callbacks.append(self._on_collection)
        # At exit the interpreter clears the modules that the hook uses, and collects during that.
        atexit.register(self.uninstall)

    def uninstall(self) -> None:
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)
        atexit.unregister(self.uninstall)

    def words(self) -> Sequence[int]:
        """A copy of the counters, in the order of the file."""
        return self._counters.tolist()

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started_ns = perf_counter_ns()
            return
        pause_ns = perf_counter_ns() - self._started_ns
        # A forked child shares the parent's file until it has its own.
        if os.getpid() != self._pid:
            return
        counters = self._counters
        first = info["generation"] * GENERATION_WORDS
        counters[first + bisect_left(BOUNDS_NS, pause_ns)] += 1
        counters[first + BUCKETS] += pause_ns
        if pause_ns > counters[first + BUCKETS + 1]:
            counters[first + BUCKETS + 1] = pause_ns


def register() -> None:
    """Record this process's pauses in the folder that ``GATEWAY_GC_DIR`` names; unset, do nothing.

    A second call does nothing. Never raises: a file that cannot be made is warned about, once.
    """
    global _registered
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or _registered:
        return
    _registered = True
    try:
        recorder = PauseRecorder(_create_file(folder, _own_role()))
    except OSError as error:
        _warn(error)
        return
    recorder.install()
    # A child of multiprocessing learns its own name only after the fork, and then moves once more.
    os.register_at_fork(after_in_child=partial(_move_to_own_file, recorder, folder, UNKNOWN_ROLE))
    multiprocessing.util.register_after_fork(recorder, partial(_move_to_named_file, folder=folder))


def process_role(name: str, command: Sequence[str]) -> str:
    """What a process is to vLLM, by its multiprocessing name, with the index if that has one."""
    if match := _VLLM_NAME.fullmatch(name):
        role = _ROLE_OF_NAME[match[1]]
        return role if match[2] is None else f"{role}_{match[2]}"
    # vLLM also starts Python anew for short jobs (model inspection), which are main processes too.
    if name == "MainProcess" and any(map(_starts_server, command[1:])):
        return "api_server"
    return UNKNOWN_ROLE


def process_status(pid: int) -> tuple[str, int]:
    """State letter of a process, and its start in clock ticks after boot. OSError if it is gone."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        stat = file.read()
    # The second field is the command, in brackets, and may hold anything: count from its end.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return fields[0].decode("ascii"), int(fields[19])


def _own_role() -> str:
    return process_role(multiprocessing.current_process().name, sys.orig_argv)


def _starts_server(argument: str) -> bool:
    return argument.startswith("vllm.entrypoints.") or os.path.basename(argument) == "vllm"


def _create_file(folder: str, role: str) -> memoryview:
    """Make this process's file appear whole under its name, and return its counters.

    The bytes are written, not left as a hole: a full disk is then an OSError here, not a SIGBUS in
    the hook.
    """
    os.makedirs(folder, exist_ok=True)
    pid = os.getpid()
    _, start_ticks = process_status(pid)
    header = HEADER.pack(MAGIC, LAYOUT_VERSION, pid, start_ticks, role.encode("ascii"))
    draft = os.path.join(folder, f".{pid}.draft")
    with open(draft, "w+b") as file:
        file.write(header + bytes(COUNTERS_BYTES))
        file.flush()
        memory = mmap.mmap(file.fileno(), FILE_BYTES)
    os.replace(draft, os.path.join(folder, f"{pid}{FILE_SUFFIX}"))
    return memoryview(memory)[HEADER.size :]


def _move_to_own_file(recorder: PauseRecorder, folder: str, role: str) -> None:
    try:
        recorder.move_to(_create_file(folder, role))
    except OSError as error:
        _warn(error)


def _move_to_named_file(recorder: PauseRecorder, folder: str) -> None:
    _move_to_own_file(recorder, folder, _own_role())


def _warn(error: OSError) -> None:
    _logger.warning("GC pauses of process %d are not recorded: %s", os.getpid(), error)
