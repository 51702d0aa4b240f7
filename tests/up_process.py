"""`gateway up` as a subprocess, with real vLLM workers, and what can be seen of its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gateway.observe.gc_pauses import ProcessPauses, read_folder
from tests.gateway_process import REPOSITORY, GatewayProcess, free_port
from tests.waiting import until

MODEL = REPOSITORY / ".models" / "SmolLM2-135M-Instruct"
MODEL_NAME = MODEL.name
LOAD_SECONDS = 300
PLUGIN = REPOSITORY / "tests" / "engine" / "plugin"


class UpProcess(GatewayProcess):
    """A gateway with workers of its own; blocks of 32 tokens: small prompts have several."""

    def __init__(self, folder: Path, args: Sequence[str] = (), vllm: Sequence[str] = ()) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.state = folder / "state"
        self.log_file = folder / f"up-{self.port}.log"
        self._log = self.log_file.open("wb")
        path = os.pathsep.join(
            filter(None, [str(REPOSITORY), str(PLUGIN), os.environ.get("PYTHONPATH")])
        )
        command = [sys.executable, "-m", "gateway", "up", str(MODEL), "--port", str(self.port)]
        command += ["--state-dir", str(self.state), "--admin-endpoints", "true", *args]
        command += ["--", "--served-model-name", MODEL_NAME, "--block-size", "32", *vllm]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "GATEWAY_SCRAPE_SECONDS": "1", "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def kill(self) -> None:
        """SIGKILL to the gateway alone: its workers' guardians must see to the rest."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()

    def all_ready(self, workers: int) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"gateway ended with {self.process.returncode}\n{self.log()}")
        try:
            return self.total("gateway_worker_up") == workers
        except (ConnectionError, TimeoutError, EOFError):
            return False

    def engine_processes(self) -> list[int]:
        """Pids of all processes that carry this gateway's state folder in their environment."""
        mark = f"GATEWAY_GC_DIR={self.state}".encode()
        return [pid for pid in _pids() if mark in _environment(pid) and not _is_zombie(pid)]

    def pauses(self, worker: str) -> list[ProcessPauses]:
        """The live GC pause files of one worker's present generation."""
        folders = list((self.state / "gc" / worker).iterdir())
        return [pauses for folder in folders for pauses in read_folder(folder)]

    def pid(self, worker: str, role: str) -> int:
        return next(p.pid for p in self.pauses(worker) if p.role.startswith(role))


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@contextmanager
def running(gateway: UpProcess, workers: int) -> Iterator[UpProcess]:
    """Ready with all its workers, and stopped behind; its log is shown where anything fails."""
    try:
        until("all workers are ready", lambda: gateway.all_ready(workers), LOAD_SECONDS)
        yield gateway
    except BaseException:
        print(gateway.log()[-8000:])
        raise
    finally:
        if gateway.process.poll() is None:
            gateway.stop()
