"""`gateway serve` as a subprocess on a free port, and what can be seen of it from outside."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from prometheus_client.parser import text_string_to_metric_families

from tests.raw_http import exchange
from tests.waiting import until

REPOSITORY = Path(__file__).resolve().parent.parent
START_SECONDS = 20
STOP_SECONDS = 15
STATES = {"01": "ESTABLISHED", "08": "CLOSE_WAIT"}  # as /proc/net/tcp writes them


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(url: str) -> Samples:
    """Every sample of a gateway's `/metrics` by name and sorted labels."""
    answer = exchange(url, "/metrics")
    assert answer.status == 200, answer.body
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }


def total(url: str, name: str, **labels: str) -> float:
    """Sum over the samples of this name that carry these labels; 0 where there is none."""
    return sum(
        value
        for (sample, has), value in samples(url).items()
        if sample == name and labels.items() <= dict(has).items()
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class GatewayProcess:
    """One gateway. `stop` sends SIGTERM and insists on a clean end."""

    def __init__(
        self,
        folder: Path,
        workers: Sequence[str],
        args: Sequence[str] = (),
        env: dict[str, str] | None = None,
        program: Sequence[str] = ("-m", "gateway"),
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_file = folder / f"gateway-{self.port}.log"
        self._log: IO[bytes] = self.log_file.open("wb")
        command = [sys.executable, *program, "serve", "--port", str(self.port)]
        for url in workers:
            command += ["--worker", url]
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [*command, *args],
            cwd=folder,
            env={**os.environ, "GATEWAY_SCRAPE_SECONDS": "1", "PYTHONPATH": path, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_ready(self, status: int = 200, seconds: float = START_SECONDS) -> None:
        """Until `/ready` answers `status`; a process that ended is reported with its log."""

        def answered() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"gateway ended with {self.process.returncode}\n{self.log()}")
            try:
                return exchange(self.url, "/ready", seconds=2).status == status
            except (ConnectionError, TimeoutError, EOFError):
                return False

        until(f"/ready is {status}", answered, seconds)

    def wait_up(self, workers: int) -> None:
        """Until so many workers take requests."""

        def all_ready() -> bool:
            states = exchange(self.url, "/ready").json()["workers"]
            return list(states.values()).count("ready") == workers

        until(f"{workers} workers are up", all_ready, 10)

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise AssertionError(f"no end {STOP_SECONDS} s after SIGTERM\n{self.log()}") from None
        finally:
            self._log.close()
        assert code == 0, f"gateway ended with {code}\n{self.log()}"
        # A worker's own last words, shown when it ended, may hold any.
        own = [line for line in self.log().splitlines() if not line.startswith("  | ")]
        assert not any("Traceback" in line for line in own), self.log()

    def kill(self) -> None:
        """SIGKILL, for a test that wants just that; `stop` is not to follow."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()

    def samples(self) -> Samples:
        """Every sample of `/metrics` by name and sorted labels."""
        return samples(self.url)

    def total(self, name: str, **labels: str) -> float:
        """Sum over the samples of this name that carry these labels; 0 where there is none."""
        return total(self.url, name, **labels)

    def sockets(self, ipv6: bool = False) -> list[tuple[int, int, str]]:
        """(local port, remote port, state) of the process's TCP sockets in a state of STATES."""
        inodes = set()
        for entry in Path(f"/proc/{self.process.pid}/fd").iterdir():
            try:
                target = str(entry.readlink())
            except FileNotFoundError:  # closed since it was listed
                continue
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
        found = []
        table = Path(f"/proc/{self.process.pid}/net/{'tcp6' if ipv6 else 'tcp'}")
        for line in table.read_text().splitlines()[1:]:
            _, local, remote, state, rest = line.split(None, 4)
            if state in STATES and rest.split(None, 6)[5] in inodes:
                ports = (int(address.rpartition(":")[2], 16) for address in (local, remote))
                found.append((*ports, STATES[state]))
        return found

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
