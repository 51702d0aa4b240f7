"""Reads the garbage-collection pauses of the gateway and of every vLLM process for ``/metrics``.

The other end of ``gateway.engine.gc_pauses``, whose hook only writes to memory: everything that
allocates or locks happens here, at scrape. Nothing is kept between two scrapes, so a process that
has ended takes its series with it.
"""

import gc
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from gateway.engine.gc_pauses import (
    BOUNDS_NS,
    BUCKETS,
    COUNTERS_BYTES,
    FILE_BYTES,
    FILE_SUFFIX,
    GENERATION_WORDS,
    GENERATIONS,
    HEADER,
    LAYOUT_VERSION,
    MAGIC,
    PauseRecorder,
    process_status,
)

GATEWAY = "gateway"
_LABELS = ("worker", "process", "generation")
_UPPER_BOUNDS = (*(str(bound / 1e9) for bound in BOUNDS_NS), "+Inf")


@dataclass(frozen=True, slots=True)
class GenerationPauses:
    """All pauses of one generation of one process; ``buckets`` are not cumulative."""

    buckets: tuple[int, ...]
    sum_seconds: float
    max_seconds: float

    @property
    def count(self) -> int:
        return sum(self.buckets)


@dataclass(frozen=True, slots=True)
class ProcessPauses:
    """The pauses of one process since it began to record, by generation 0, 1 and 2."""

    role: str
    pid: int
    start_ticks: int
    generations: tuple[GenerationPauses, ...]


def read_folder(folder: Path) -> list[ProcessPauses]:
    """The pauses of every process alive, the oldest first. Files of ended ones are removed.

    A file that is not a whole pause file of this layout is left alone, a missing folder is empty.
    """
    found = []
    for path in _files(folder):
        pauses = _read_file(path)
        if pauses is None or path.name != f"{pauses.pid}{FILE_SUFFIX}":
            continue
        if _is_alive(pauses):
            found.append(pauses)
        else:
            with suppress(OSError):
                path.unlink()
    return sorted(found, key=lambda pauses: (pauses.start_ticks, pauses.pid))


class OwnPauses:
    """The same hook on this process, writing to memory of its own. ``close`` ends the recording."""

    def __init__(self) -> None:
        self._recorder = PauseRecorder(memoryview(mmap.mmap(-1, COUNTERS_BYTES)))
        self._recorder.install()

    def read(self) -> ProcessPauses:
        pid = os.getpid()
        _, start_ticks = process_status(pid)
        return ProcessPauses(GATEWAY, pid, start_ticks, _generations(self._recorder.words()))

    def close(self) -> None:
        self._recorder.uninstall()


def freeze_heap() -> int:
    """Put all objects alive out of the collector's sight and return how many those are.

    For the end of the warm-up: what lives as long as the process is then never traversed again.
    """
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()


class GcPauseCollector(Collector):
    """Pauses by worker, process and generation, of the gateway and of all workers.

    ``folders`` says at each scrape in which folder the processes of each worker write. A process is
    named by its role, never its pid; of two with one role the younger gets ``-2``.
    """

    def __init__(self, folders: Callable[[], Mapping[str, Path]], own: OwnPauses) -> None:
        self._folders = folders
        self._own = own

    def describe(self) -> Iterable[Metric]:
        return _families()

    def collect(self) -> Iterator[Metric]:
        pauses, longest = _families()
        for worker, process, of_process in self._processes():
            for generation, of_generation in enumerate(of_process.generations):
                labels = (worker, process, str(generation))
                cumulative = accumulate(of_generation.buckets)
                pauses.add_metric(
                    labels,
                    list(zip(_UPPER_BOUNDS, cumulative, strict=True)),
                    of_generation.sum_seconds,
                )
                longest.add_metric(labels, of_generation.max_seconds)
        yield pauses
        yield longest

    def _processes(self) -> Iterator[tuple[str, str, ProcessPauses]]:
        yield GATEWAY, GATEWAY, self._own.read()
        for worker, folder in self._folders().items():
            seen: dict[str, int] = {}
            for pauses in read_folder(folder):
                nth = seen[pauses.role] = seen.get(pauses.role, 0) + 1
                yield worker, pauses.role if nth == 1 else f"{pauses.role}-{nth}", pauses


def _families() -> tuple[HistogramMetricFamily, GaugeMetricFamily]:
    pauses = HistogramMetricFamily(
        "gateway_gc_pause_seconds",
        "Time for which a garbage collection stopped a process of the gateway or of vLLM.",
        labels=_LABELS,
    )
    longest = GaugeMetricFamily(
        "gateway_gc_pause_max_seconds",
        "Longest garbage-collection pause since the process began to record.",
        labels=_LABELS,
    )
    return pauses, longest


def _files(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.suffix == FILE_SUFFIX]
    except OSError:
        return []


def _read_file(path: Path) -> ProcessPauses | None:
    try:
        data = _read(path)
    except OSError:
        return None
    if len(data) != FILE_BYTES:
        return None
    magic, version, pid, start_ticks, role = HEADER.unpack_from(data)
    if magic != MAGIC or version != LAYOUT_VERSION:
        return None
    words = memoryview(data)[HEADER.size :].cast("Q")
    return ProcessPauses(
        role.rstrip(b"\0").decode("ascii", "replace"), pid, start_ticks, _generations(words)
    )


def _read(path: Path) -> bytes:
    """The first bytes of a file, one more than it should have.

    Read, not mapped: a file that somebody cuts short must not be able to kill the gateway by
    SIGBUS. The kernel copies aligned words whole; that a pause may be in the buckets and not yet
    in the sum does no harm.
    """
    # Not blocking: whatever has the name may be a pipe.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.pread(file, FILE_BYTES + 1, 0)
    finally:
        os.close(file)


def _generations(words: Sequence[int]) -> tuple[GenerationPauses, ...]:
    return tuple(
        GenerationPauses(
            tuple(words[first : first + BUCKETS]),
            words[first + BUCKETS] / 1e9,
            words[first + BUCKETS + 1] / 1e9,
        )
        for first in range(0, GENERATIONS * GENERATION_WORDS, GENERATION_WORDS)
    )


def _is_alive(pauses: ProcessPauses) -> bool:
    """Whether it runs still: its pid may belong to a later process, and a zombie has ended."""
    try:
        state, start_ticks = process_status(pauses.pid)
    except OSError:
        return False
    return state not in "ZX" and start_ticks == pauses.start_ticks
