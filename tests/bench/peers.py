"""The gateways that ours is measured beside, in an environment that nothing else uses."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.figures import CannotMeasure

PINNED = Path(__file__).with_name("peers.txt")
OURS, VLLM_ROUTER, SGLANG_ROUTER = "ours", "vllm-router", "sglang-router"
COMPLETE = "complete"
INSTALL_SECONDS = 600


@dataclass(frozen=True)
class Contender:
    """`command` is called with the port to listen on, one for metrics, and the workers' URLs."""

    name: str
    command: Callable[[int, int, Sequence[str]], list[str]]


def ours() -> Contender:
    def command(port: int, _: int, workers: Sequence[str]) -> list[str]:
        serve = [sys.executable, "-m", "gateway", "serve", "--port", str(port)]
        return serve + [part for url in workers for part in ("--worker", url)]

    return Contender(OURS, command)


def peers() -> list[Contender]:
    """Installed first, if they are not yet; raises CannotMeasure."""
    programs = _environment() / "bin"

    def command(program: list[str]) -> Callable[[int, int, Sequence[str]], list[str]]:
        def with_ports(port: int, metrics_port: int, workers: Sequence[str]) -> list[str]:
            routing = ["--worker-urls", *workers, "--policy", "cache_aware"]
            ports = ["--port", str(port), "--prometheus-port", str(metrics_port)]
            return [*program, *routing, *ports, "--host", "127.0.0.1", "--log-level", "error"]

        return with_ports

    return [
        Contender(VLLM_ROUTER, command([str(programs / "vllm-router")])),
        Contender(SGLANG_ROUTER, command([str(programs / "sglang-router"), "launch"])),
    ]


def _environment() -> Path:
    """A virtual environment in the temporary folder, kept between runs, for just these pins."""
    key = hashlib.sha256(PINNED.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"gateway-bench-peers-{os.getuid()}-{key}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise CannotMeasure(f"{folder} belongs to somebody else")
    with (folder / "lock").open("w") as lock:  # two runs at once install it once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / COMPLETE).exists():
            _install(folder / "venv")
            (folder / COMPLETE).touch()
    return folder / "venv"


def _install(target: Path) -> None:
    print(f"installing {PINNED.name} into {target}", flush=True)
    shutil.rmtree(target, ignore_errors=True)
    venv.create(target, with_pip=True)
    command = [str(target / "bin" / "python"), "-m", "pip", "install", "-qq", "--no-deps"]
    try:
        subprocess.run(
            [*command, "--requirement", str(PINNED)], check=True, timeout=INSTALL_SECONDS
        )
    except subprocess.SubprocessError as error:
        raise CannotMeasure(f"{error}; --no-peers measures without them") from error
