"""The hook in real processes: what it counts, where it writes, and what it must never do."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace

import pytest

from gateway.engine import gc_pauses
from gateway.engine.gc_pauses import (
    BOUNDS_NS,
    BUCKETS,
    COUNTERS_BYTES,
    FILE_BYTES,
    GENERATION_WORDS,
    MAGIC,
    PauseRecorder,
    process_role,
)
from gateway.observe.gc_pauses import ProcessPauses, read_folder
from tests.recorded_process import RecordedProcess, environment

CHILD = """
import gc, multiprocessing, sys
from gateway.engine.gc_pauses import register

def child(collections, line):
    gc.disable()
    register()
    for _ in range(collections):
        gc.collect(1)
    line.send("collected")
    line.recv()

if __name__ == "__main__":
    gc.disable()
    register()
    context = multiprocessing.get_context(sys.argv[1])
    lines = []
    for collections, name in enumerate(sys.argv[2:], start=1):
        ours, theirs = context.Pipe()
        context.Process(target=child, name=name, args=(collections, theirs)).start()
        ours.recv()
        lines.append(ours)
    print("ready", flush=True)
    sys.stdin.readline()
    for line in lines:
        line.send("end")
"""


def counts(pauses: ProcessPauses) -> tuple[int, ...]:
    return tuple(generation.count for generation in pauses.generations)


def by_role(folder: Path) -> dict[str, tuple[int, ...]]:
    return {pauses.role: counts(pauses) for pauses in read_folder(folder)}


@contextmanager
def running(*command: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(folder),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


# --- what is counted ---


def test_each_collection_is_one_pause_of_its_generation(tmp_path: Path) -> None:
    began = perf_counter_ns()
    with RecordedProcess(tmp_path) as process:
        process.run("for generation in 0, 0, 0, 1, 1, 2: gc.collect(generation)")
        [pauses] = read_folder(tmp_path)
        elapsed_seconds = (perf_counter_ns() - began) / 1e9
    assert pauses.pid == process.pid
    assert counts(pauses) == (3, 2, 1)
    for generation in pauses.generations:
        assert 0 < generation.max_seconds <= generation.sum_seconds < elapsed_seconds
        assert generation.max_seconds * generation.count >= generation.sum_seconds


def test_a_slow_finalizer_is_part_of_the_pause(tmp_path: Path) -> None:
    with RecordedProcess(tmp_path) as process:
        process.run(
            "from time import perf_counter\n"
            "class Slow:\n"
            "    def __init__(self): self.itself = self\n"
            "    def __del__(self):\n"
            "        end = perf_counter() + 0.03\n"
            "        while perf_counter() < end: pass\n"
            "Slow(); gc.collect()"
        )
        [pauses] = read_folder(tmp_path)
    full = pauses.generations[2]
    [bucket] = (bucket for bucket, count in enumerate(full.buckets) if count)
    assert full.max_seconds >= 0.03
    assert BOUNDS_NS[bucket - 1] < full.max_seconds * 1e9 <= BOUNDS_NS[bucket]


@pytest.mark.parametrize("bucket", range(BUCKETS))
def test_a_bound_belongs_to_the_bucket_below_it(
    bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now_ns=5)
    monkeypatch.setattr(gc_pauses, "perf_counter_ns", lambda: clock.now_ns)
    recorder = PauseRecorder(memoryview(bytearray(COUNTERS_BYTES)))
    shortest = BOUNDS_NS[bucket - 1] + 1 if bucket else 0
    longest = BOUNDS_NS[bucket] if bucket < len(BOUNDS_NS) else 10**14
    for pause_ns in longest, shortest:
        recorder._on_collection("start", {"generation": 1})
        clock.now_ns += pause_ns
        recorder._on_collection("stop", {"generation": 1})
    expected = [0] * (3 * GENERATION_WORDS)
    expected[GENERATION_WORDS + bucket] = 2
    expected[GENERATION_WORDS + BUCKETS] = longest + shortest
    expected[GENERATION_WORDS + BUCKETS + 1] = longest
    assert recorder.words() == expected


def test_installed_during_a_collection_it_measures_from_then(tmp_path: Path) -> None:
    with RecordedProcess(None) as process:
        process.run(
            "class Registering:\n"
            "    def __init__(self): self.itself = self\n"
            "    def __del__(self):\n"
            f"        os.environ['GATEWAY_GC_DIR'] = {str(tmp_path)!r}\n"
            "        gc_pauses.register()\n"
            "Registering(); gc.collect()"
        )
        [pauses] = read_folder(tmp_path)
    assert counts(pauses) == (0, 0, 1)
    assert pauses.generations[2].sum_seconds < 5


def test_threads_lose_no_pause(tmp_path: Path) -> None:
    with RecordedProcess(tmp_path) as process:
        process.run(
            "def allocate():\n"
            "    for step in range(300):\n"
            "        kept = [[] for _ in range(100)]\n"
            "        gc.collect(0 if step % 20 else step % 3)\n"
            "sys.setswitchinterval(1e-6)\n"
            "gc.set_threshold(50, 5, 5)\n"
            "before = [generation['collections'] for generation in gc.get_stats()]\n"
            "gc.enable()\n"
            "threads = [threading.Thread(target=allocate) for _ in range(4)]\n"
            "for thread in threads: thread.start()\n"
            "for thread in threads: thread.join()\n"
            "gc.disable()\n"
            "after = [generation['collections'] for generation in gc.get_stats()]\n"
            f"open({str(tmp_path / 'truth')!r}, 'w').write(\n"
            "    ' '.join(str(now - then) for now, then in zip(after, before)))"
        )
        [pauses] = read_folder(tmp_path)
    truth = tuple(map(int, (tmp_path / "truth").read_text().split()))
    assert counts(pauses) == truth
    assert min(truth) > 0


# --- what the hook must not do ---


def collections_during(call: Callable[[], object]) -> int:
    """Collections in a thousand calls, where every tracked object that is allocated starts one."""
    threshold = gc.get_threshold()
    before = gc.get_stats()[0]["collections"]
    try:
        gc.set_threshold(-1, 10**6, 10**6)
        for _ in range(1000):
            call()
    finally:
        gc.set_threshold(*threshold)
    return gc.get_stats()[0]["collections"] - before


def test_the_hook_allocates_nothing_that_the_collector_tracks() -> None:
    recorder = PauseRecorder(memoryview(bytearray(COUNTERS_BYTES)))
    hook, info = recorder._on_collection, {"generation": 2}

    def one_collection() -> None:
        hook("start", info)
        hook("stop", info)

    # Setting up may start a few, the thousand calls none.
    assert collections_during(one_collection) < 10
    assert collections_during(lambda: {hook}) >= 1000
    assert sum(recorder.words()[2 * GENERATION_WORDS :][:BUCKETS]) == 1000


def test_cost_of_the_hook(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = PauseRecorder(memoryview(bytearray(COUNTERS_BYTES)))
    info = {"generation": 0}
    began = perf_counter_ns()
    for _ in range(10_000):
        recorder._on_collection("start", info)
        recorder._on_collection("stop", info)
    with capsys.disabled():
        print(f" [{(perf_counter_ns() - began) / 10_000:.0f} ns a collection]", end="")


def test_without_a_folder_nothing_is_hooked() -> None:
    with RecordedProcess(None) as process:
        process.run("assert not gc.callbacks")


def test_a_second_registration_changes_nothing(tmp_path: Path) -> None:
    with RecordedProcess(tmp_path) as process:
        process.run("gc_pauses.register(); gc_pauses.register(); gc.collect(0)")
        process.run("assert len(gc.callbacks) == 1")
        [pauses] = read_folder(tmp_path)
    assert counts(pauses) == (1, 0, 0)


def test_a_folder_that_cannot_be_made_is_warned_about_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with RecordedProcess(tmp_path / "file" / "folder") as process:
        process.run("gc_pauses.register(); gc.collect()")
        process.run("assert not gc.callbacks")
    assert process.stderr.count("are not recorded") == 1
    assert len(process.stderr.splitlines()) == 1


def test_a_full_disk_is_an_error_at_creation(tmp_path: Path) -> None:
    with RecordedProcess(None) as process:
        process.run(
            "import resource, signal\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))\n"
            f"os.environ['GATEWAY_GC_DIR'] = {str(tmp_path)!r}\n"
            "gc_pauses.register(); gc.collect()"
        )
    assert "are not recorded" in process.stderr
    assert not read_folder(tmp_path)


def test_collections_of_a_closing_interpreter_are_quiet(tmp_path: Path) -> None:
    with RecordedProcess(tmp_path) as process:
        # A module alive to the end has its names set to None one by one, in order of definition.
        process.run(
            "import builtins\n"
            "class Late:\n"
            "    def __del__(self, collect=gc.collect): collect()\n"
            "builtins.module = gc_pauses; gc_pauses.late = Late()"
        )
    assert process.stderr == ""


# --- forks and files ---


def test_a_forked_child_writes_to_its_own_file(tmp_path: Path) -> None:
    with RecordedProcess(None) as process:
        process.run(
            "import multiprocessing\n"
            "multiprocessing.current_process().name = 'EngineCore'\n"
            f"os.environ['GATEWAY_GC_DIR'] = {str(tmp_path)!r}\n"
            "gc_pauses.register()\n"
            "gc.collect(0)\n"
            "held, release = os.pipe()\n"
            "told, tell = os.pipe()\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    gc.collect(1); gc.collect(1)\n"
            "    os.write(tell, b'.'); os.read(held, 1); os._exit(0)\n"
            "os.read(told, 1)\n"
            "gc.collect(2)"
        )
        parent, child = sorted(read_folder(tmp_path), key=lambda read: read.pid != process.pid)
        assert (parent.role, parent.pid, counts(parent)) == ("engine_core", process.pid, (1, 0, 1))
        # Not by its parent's name, and it has no other.
        assert (child.role, counts(child)) == ("other", (0, 2, 0))
        process.run("os.write(release, b'.'); os.waitpid(child, 0)")
        assert read_folder(tmp_path) == [parent]


def test_a_child_counts_nothing_before_it_has_a_file(tmp_path: Path) -> None:
    with RecordedProcess(None) as process:
        process.run(
            "os.register_at_fork(after_in_child=gc.collect)\n"
            f"os.environ['GATEWAY_GC_DIR'] = {str(tmp_path)!r}\n"
            "gc_pauses.register()\n"
            "child = os.fork()\n"
            "if child == 0: os._exit(0)\n"
            "os.waitpid(child, 0)"
        )
        [parent] = read_folder(tmp_path)
    assert counts(parent) == (0, 0, 0)


def test_a_child_that_gets_no_file_leaves_its_parents_alone(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with RecordedProcess(folder) as process:
        (folder / f"{process.pid}.gc").rename(tmp_path / f"{process.pid}.gc")
        folder.rmdir()
        folder.touch()
        process.run(
            "child = os.fork()\n"
            "if child == 0: gc.collect(); os._exit(0)\n"
            "assert os.waitpid(child, 0)[1] == 0"
        )
        [parent] = read_folder(tmp_path)
    assert counts(parent) == (0, 0, 0)
    assert process.stderr.count("are not recorded") == 1


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_multiprocessing_go_by_the_name_vllm_gives_them(
    method: str, tmp_path: Path
) -> None:
    script = tmp_path / "vllm"
    script.write_text(CHILD)
    folder = tmp_path / "gc"
    names = ("EngineCore", "VllmWorker-0", "VllmWorker-1")
    with running(sys.executable, str(script), method, *names, folder=folder):
        assert by_role(folder) == {
            "api_server": (0, 0, 0),
            "engine_core": (0, 1, 0),
            "worker_0": (0, 2, 0),
            "worker_1": (0, 3, 0),
        }
    assert read_folder(folder) == []
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "command", "role"),
    [
        ("MainProcess", ["python", "-P", "-m", "vllm.entrypoints.openai.api_server"], "api_server"),
        ("MainProcess", ["python", "/opt/venv/bin/vllm", "serve", "model"], "api_server"),
        ("MainProcess", ["python", "-m", "vllm.model_executor.models.registry"], "other"),
        ("ApiServer_1", ["python"], "api_server_1"),
        ("EngineCore", ["python"], "engine_core"),
        ("EngineCore_DP12", ["python"], "engine_core_12"),
        ("EngineCore_0", ["python"], "engine_core_0"),
        ("VllmWorker-3", ["python"], "worker_3"),
        ("VLLM_DP_Coordinator", ["python"], "dp_coordinator"),
        ("EngineCore_extra", ["python"], "other"),
        ("SpawnProcess-1", ["python", "-m", "vllm.entrypoints.openai.api_server"], "other"),
    ],
)
def test_role(name: str, command: list[str], role: str) -> None:
    assert process_role(name, command) == role


def test_a_file_is_whole_from_the_moment_it_has_its_name(tmp_path: Path) -> None:
    with RecordedProcess(None) as process:
        process.run(
            f"folder = {str(tmp_path)!r}\n"
            "seen = set()\n"
            "def look(*_):\n"
            "    for name in os.listdir(folder):\n"
            "        if name.endswith('.gc'):\n"
            "            seen.add(open(os.path.join(folder, name), 'rb').read())\n"
            "    return look\n"
            "os.environ['GATEWAY_GC_DIR'] = folder\n"
            # At every line of every function called.
            "sys.settrace(look); gc_pauses.register(); sys.settrace(None)\n"
            "[content] = seen\n"
            f"assert len(content) == {FILE_BYTES} and content.startswith({MAGIC!r})"
        )
    [file] = tmp_path.iterdir()
    assert file.name == f"{process.pid}.gc"
