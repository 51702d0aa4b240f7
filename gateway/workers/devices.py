"""What this host has to run workers on: GPUs and processor cores."""

import glob
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
COUNT_GPUS_SECONDS = 120
CPU_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")
CPU_TOPOLOGY_FOLDER = Path("/sys/devices/system/cpu")

T = TypeVar("T")


class DeviceError(Exception):
    """The devices of this host cannot be told, or not be used as asked."""


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Each usable GPU as CUDA_VISIBLE_DEVICES names it.

    They are counted by the engine's own PyTorch (a CPU build sees none), in a process that ends: a
    CUDA context would take memory from the workers. Raises DeviceError where it cannot be asked.
    """
    has_driver = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if not (has_driver or glob.glob("/dev/nvidia[0-9]*")):
        return ()
    command = [sys.executable, "-P", "-c", COUNT_GPUS]
    try:
        answer = subprocess.run(
            command,
            env={**environment},
            capture_output=True,
            text=True,
            timeout=COUNT_GPUS_SECONDS,
            check=True,
        )
        count = int(answer.stdout)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        detail = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1]
        raise DeviceError(f"cannot count the GPUs by `{' '.join(command)}`: {detail}") from error
    named = environment.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in named.split(",")] if named else map(str, range(count))
    return tuple(names)[:count]


def select_gpus(visible: Sequence[str], wanted: Sequence[int]) -> tuple[str, ...]:
    """The GPUs at the positions `wanted` among the visible ones. Raises DeviceError."""
    if len(set(wanted)) != len(wanted):
        raise DeviceError(f"--gpus {_listed(wanted)}: a GPU can serve one worker only")
    for position in wanted:
        if not 0 <= position < len(visible):
            have = f"0 to {len(visible) - 1}" if visible else "none"
            raise DeviceError(f"--gpus {_listed(wanted)}: no GPU {position}; there is {have}")
    return tuple(visible[position] for position in wanted)


def core_shares(workers: int) -> list[list[int]]:
    """Processor ids for each CPU worker's compute threads, disjoint if there are enough.

    One id per physical core, since two compute threads gain little by sharing one; neighbouring
    cores stay together. A container's CPU quota counts as that many cores.
    """
    logical = sorted(os.sched_getaffinity(0))
    physical = [siblings[0] for siblings in _by_core(logical)]
    quota = _cpu_quota()
    if quota is not None:
        limit = max(math.ceil(quota), workers)
        logical, physical = logical[:limit], physical[:limit]
    for ids in (physical, logical):
        if len(ids) >= workers:
            return split(ids, workers)
    return [[logical[worker % len(logical)]] for worker in range(workers)]


def split(items: Sequence[T], parts: int) -> list[list[T]]:
    """`items` in `parts` runs of neighbours whose lengths differ by one at most."""
    bounds = [len(items) * part // parts for part in range(parts + 1)]
    return [list(items[start:end]) for start, end in pairwise(bounds)]


def _by_core(logical: Sequence[int]) -> list[list[int]]:
    cores: dict[tuple[int, int], list[int]] = {}
    for cpu in logical:
        topology = CPU_TOPOLOGY_FOLDER / f"cpu{cpu}" / "topology"
        try:
            package = int((topology / "physical_package_id").read_text())
            core = int((topology / "core_id").read_text())
        except (OSError, ValueError):
            package, core = -1, cpu  # not told: as if each were a core of its own
        cores.setdefault((package, core), []).append(cpu)
    return [cores[core] for core in sorted(cores)]


def _cpu_quota() -> float | None:
    """Processors' worth of time that the control group allows; None: no limit."""
    try:
        quota, period = CPU_QUOTA_FILE.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None  # no such file, or "max"


def _listed(positions: Sequence[int]) -> str:
    return ",".join(map(str, positions))
