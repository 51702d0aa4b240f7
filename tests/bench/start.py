"""Seconds from the command to the first answer of `gateway serve`, without workers."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

from tests.gateway_process import GatewayProcess


def measure(rounds: int) -> dict[str, object]:
    seconds = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            gateway = GatewayProcess(Path(folder), [])
            gateway.wait_ready(503)
            seconds.append(time.perf_counter() - began)
            gateway.stop()
    print(f"start without workers: {median(seconds):.2f} s (of {rounds}, bound 1.5 s)")
    return {"start_seconds": [round(s, 3) for s in seconds], "median": round(median(seconds), 3)}
