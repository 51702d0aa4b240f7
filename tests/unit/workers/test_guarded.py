from __future__ import annotations

import os
from pathlib import Path

from gateway.workers.guarded import LAST_BYTES, LAST_LINES, LOG_LIMIT_BYTES, WorkerLog

FAILED_START = """\
(EngineCore pid=13036) INFO 11-30 02:13:41 [core.py:133] Initializing a V1 LLM engine
(EngineCore pid=13036) ERROR 11-30 02:13:41 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=13036) ERROR 11-30 02:13:41 [core.py:1510]   File "/a/core.py", line 1, in f
(EngineCore pid=13036) ERROR 11-30 02:13:41 [core.py:1510]     engine_core = EngineCoreProc(
(EngineCore pid=13036) ERROR 11-30 02:13:41 [core.py:1510]                   ^^^^^^^^^^^^^^^
(EngineCore pid=13036) ERROR 11-30 02:13:41 [core.py:1510] ValueError: No available memory
Traceback (most recent call last):
  File "/a/utils.py", line 1431, in wait_for_engine_startup
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above.
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (100000) is too large
"""


def write(log: WorkerLog, text: str) -> None:
    descriptor = log.open()
    os.write(descriptor, text.encode())
    os.close(descriptor)


def test_a_failure_is_told_by_its_messages_not_by_its_frames(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "worker.log")
    write(log, FAILED_START)
    told = log.last_lines()
    assert len(told) == 7
    assert told[2].endswith("ValueError: No available memory")
    assert told[-1].endswith("is too large")


def test_the_last_lines_are_of_the_last_start_and_bounded(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "worker.log")
    assert log.last_lines() == ()
    write(log, "old\n" * 3)
    write(log, "new\r\n\n" * 3)
    assert log.last_lines() == ("new",) * 3
    write(log, "x" * 2 * LAST_BYTES + "\n" + "end\n" * 2 * LAST_LINES)
    assert log.last_lines() == ("end",) * LAST_LINES
    assert (tmp_path / "worker.log").read_text().startswith("old\n")


def test_a_log_grown_too_long_is_set_aside_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    log = WorkerLog(path)
    write(log, "first\n")
    os.truncate(path, LOG_LIMIT_BYTES + 1)
    write(log, "second\n")
    assert path.read_text() == "second\n"
    assert log.last_lines() == ("second",)
    assert (tmp_path / "worker.log.1").stat().st_size == LOG_LIMIT_BYTES + 1


def test_bytes_that_are_no_text_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    log = WorkerLog(path)
    write(log, "")
    path.write_bytes(b"\xff\xfe broken\n")
    assert log.last_lines()[0].endswith("broken")
