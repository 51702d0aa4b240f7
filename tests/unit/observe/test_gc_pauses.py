"""Reading pause files, whole and damaged, of processes alive and ended, and what a scrape shows."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.engine.gc_pauses import (
    BUCKETS,
    COUNTERS_BYTES,
    FILE_BYTES,
    GENERATION_WORDS,
    HEADER,
    LAYOUT_VERSION,
    MAGIC,
    process_status,
)
from gateway.observe.gc_pauses import (
    GcPauseCollector,
    OwnPauses,
    ProcessPauses,
    freeze_heap,
    read_folder,
)
from tests.recorded_process import RecordedProcess

START_TICKS = process_status(os.getpid())[1]
Samples = dict[tuple[str, str, str, str], float]


def content(
    version: int = LAYOUT_VERSION,
    pid: int | None = None,
    start_ticks: int = START_TICKS,
    role: str = "engine_core",
) -> bytes:
    """A file of this very process unless told otherwise: one pause of 2 s in generation 2."""
    pid = os.getpid() if pid is None else pid
    header = HEADER.pack(MAGIC, version, pid, start_ticks, role.encode())
    words = memoryview(bytearray(COUNTERS_BYTES)).cast("Q")
    first = 2 * GENERATION_WORDS
    words[first + 14] = 1
    words[first + BUCKETS] = words[first + BUCKETS + 1] = 2 * 10**9
    return header + bytes(words.cast("B"))


OWN_FILE = f"{os.getpid()}.gc"


@pytest.fixture
def own() -> Iterator[OwnPauses]:
    """This process's own pauses, without any that a test does not ask for."""
    gc.disable()
    recording = OwnPauses()
    yield recording
    recording.close()
    gc.enable()


def full_collections(pauses: ProcessPauses) -> int:
    return pauses.generations[2].count


# --- files ---


def test_a_missing_folder_and_an_empty_one_hold_nothing(tmp_path: Path) -> None:
    assert read_folder(tmp_path) == []
    assert read_folder(tmp_path / "missing") == []


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    (tmp_path / OWN_FILE).write_bytes(content())
    [pauses] = read_folder(tmp_path)
    assert (pauses.role, pauses.pid) == ("engine_core", os.getpid())
    assert [generation.count for generation in pauses.generations] == [0, 0, 1]
    assert pauses.generations[2].sum_seconds == pauses.generations[2].max_seconds == 2.0


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (OWN_FILE, b""),
        (OWN_FILE, content()[:20]),
        (OWN_FILE, content()[: FILE_BYTES - 1]),
        (OWN_FILE, content() + b"\0"),
        (OWN_FILE, b"\0" * FILE_BYTES),
        (OWN_FILE, b"x" + content()[1:]),
        (OWN_FILE, content(version=LAYOUT_VERSION + 1)),
        ("1.gc", content()),
        ("1.gc", content(pid=2)),
        ("notes.gc", b"notes"),
        (".gc", content()),
        (f".{os.getpid()}.draft", content()),
    ],
)
def test_a_file_that_is_no_whole_pause_file_is_left_alone(
    name: str, data: bytes, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    assert read_folder(tmp_path) == []
    assert (tmp_path / name).read_bytes() == data


@pytest.mark.parametrize(
    "make",
    [
        os.mkdir,
        os.mkfifo,
        lambda path: os.symlink("/dev/zero", path),
        lambda path: os.symlink("missing", path),
    ],
    ids=["folder", "fifo", "link", "broken link"],
)
def test_what_is_no_file_is_left_alone(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "7.gc")
    (tmp_path / OWN_FILE).write_bytes(content())
    assert len(read_folder(tmp_path)) == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    for length in range(FILE_BYTES):
        (tmp_path / OWN_FILE).write_bytes(content()[:length])
        assert read_folder(tmp_path) == []


def test_the_file_of_an_ended_process_is_removed(tmp_path: Path) -> None:
    with RecordedProcess(tmp_path):
        assert len(read_folder(tmp_path)) == 1
    assert len(list(tmp_path.iterdir())) == 1
    assert read_folder(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_zombie_has_ended(tmp_path: Path) -> None:
    with RecordedProcess(tmp_path) as process:
        process.kill_unreaped()
        assert read_folder(tmp_path) == []
        assert list(tmp_path.iterdir()) == []


def test_a_later_process_with_the_same_pid_is_another(tmp_path: Path) -> None:
    (tmp_path / OWN_FILE).write_bytes(content(start_ticks=START_TICKS - 1))
    assert read_folder(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_command_name_cannot_forge_the_process_status() -> None:
    with RecordedProcess(None) as process:
        honest = process_status(process.pid)
        process.run("open('/proc/self/comm', 'w').write(') Z 1 (x')")
        forged = process_status(process.pid)
    assert forged[0] != "Z"
    assert forged[1] == honest[1]


def test_counts_only_grow_while_a_storm_of_collections_goes_on(tmp_path: Path) -> None:
    with RecordedProcess(tmp_path) as process:
        process.run(
            "ending = threading.Event()\n"
            "def storm():\n"
            "    global collections\n"
            "    collections = 0\n"
            "    while not ending.is_set():\n"
            "        gc.collect(0); collections += 1\n"
            "storming = threading.Thread(target=storm); storming.start()"
        )
        reads = [read_folder(tmp_path)[0].generations[0] for _ in range(500)]
        process.run(
            "ending.set(); storming.join()\n"
            f"open({str(tmp_path / 'truth')!r}, 'w').write(str(collections))"
        )
        last = read_folder(tmp_path)[0].generations[0]
    assert reads[0].count < reads[-1].count
    assert last.count == int((tmp_path / "truth").read_text())
    for earlier, later in zip(reads, [*reads[1:], last], strict=True):
        assert all(now >= then for now, then in zip(later.buckets, earlier.buckets, strict=True))
        assert later.sum_seconds >= earlier.sum_seconds
        assert later.max_seconds >= earlier.max_seconds


# --- this process ---


def test_own_pauses_are_recorded_until_closed(own: OwnPauses) -> None:
    assert full_collections(own.read()) == 0
    gc.collect()
    gc.collect()
    assert full_collections(own.read()) == 2
    assert (own.read().role, own.read().pid) == ("gateway", os.getpid())
    own.close()
    gc.collect()
    assert full_collections(own.read()) == 2


def test_a_frozen_heap_is_counted() -> None:
    kept = [[] for _ in range(10_000)]
    try:
        assert freeze_heap() == gc.get_freeze_count() >= len(kept)
    finally:
        gc.unfreeze()


# --- the scrape ---


def scrape(registry: CollectorRegistry) -> Samples:
    """Every sample by its name and its worker, process and generation; `le` is part of the name."""
    text = generate_latest(registry).decode()
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            name = sample.name + (f" {labels.pop('le')}" if "le" in labels else "")
            assert set(labels) == {"worker", "process", "generation"}
            key = (name, labels["worker"], labels["process"], labels["generation"])
            assert key not in samples, f"twice: {key}"
            samples[key] = sample.value
    return samples


def processes(samples: Samples) -> set[tuple[str, str]]:
    return {(worker, process) for _, worker, process, _ in samples}


def test_a_scrape_shows_every_process_by_worker_and_role(tmp_path: Path, own: OwnPauses) -> None:
    registry = CollectorRegistry()
    registry.register(GcPauseCollector(lambda: {"0": tmp_path / "0", "1": tmp_path / "1"}, own))
    with RecordedProcess(tmp_path / "0") as process, RecordedProcess(tmp_path / "1"):
        before = scrape(registry)
        process.run("gc.collect(2)")
        gc.collect(0)
        after = scrape(registry)
    moved = {key: value - before[key] for key, value in after.items() if value != before[key]}

    assert processes(after) == {("gateway", "gateway"), ("0", "other"), ("1", "other")}
    assert {key[1:] for key in moved} == {("0", "other", "2"), ("gateway", "gateway", "0")}
    assert moved["gateway_gc_pause_seconds_count", "0", "other", "2"] == 1
    assert (
        moved["gateway_gc_pause_seconds_sum", "0", "other", "2"]
        == moved["gateway_gc_pause_max_seconds", "0", "other", "2"]
        > 0
    )
    assert processes(scrape(registry)) == {("gateway", "gateway")}


def test_buckets_are_cumulative_and_end_in_the_count(tmp_path: Path, own: OwnPauses) -> None:
    (tmp_path / OWN_FILE).write_bytes(content())
    registry = CollectorRegistry()
    registry.register(GcPauseCollector(lambda: {"7": tmp_path}, own))
    samples = scrape(registry)

    def full(name: str) -> float:
        return samples[f"gateway_gc_pause_{name}", "7", "engine_core", "2"]

    assert (full("seconds_bucket 5e-05"), full("seconds_bucket 1.0")) == (0, 0)
    assert (full("seconds_bucket 2.5"), full("seconds_bucket 10.0")) == (1, 1)
    assert (full("seconds_bucket +Inf"), full("seconds_count")) == (1, 1)
    assert (full("seconds_sum"), full("max_seconds")) == (2.0, 2.0)
    buckets = [
        key for key in samples if "bucket" in key[0] and key[1:] == ("7", "engine_core", "2")
    ]
    assert len(buckets) == BUCKETS


def test_two_processes_of_one_role_are_told_apart_by_age(tmp_path: Path, own: OwnPauses) -> None:
    registry = CollectorRegistry()
    registry.register(GcPauseCollector(lambda: {"0": tmp_path}, own))
    with RecordedProcess(tmp_path) as older:
        older.run("gc.collect(1)")
        with RecordedProcess(tmp_path):
            both = scrape(registry)
            assert processes(both) - {("gateway", "gateway")} == {("0", "other"), ("0", "other-2")}
            assert both["gateway_gc_pause_seconds_count", "0", "other", "1"] == 1
        assert processes(scrape(registry)) - {("gateway", "gateway")} == {("0", "other")}


def test_the_folders_are_looked_up_at_each_scrape_only(tmp_path: Path, own: OwnPauses) -> None:
    (tmp_path / OWN_FILE).write_bytes(content())
    folders: dict[str, Path] = {}
    lookups: list[int] = []

    def look_up() -> dict[str, Path]:
        lookups.append(1)
        return folders

    registry = CollectorRegistry()
    registry.register(GcPauseCollector(look_up, own))
    assert not lookups
    assert processes(scrape(registry)) == {("gateway", "gateway")}
    folders["3"] = tmp_path
    assert ("3", "engine_core") in processes(scrape(registry))
    folders.clear()
    assert processes(scrape(registry)) == {("gateway", "gateway")}
