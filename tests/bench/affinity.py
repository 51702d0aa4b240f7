"""Prefix affinity against round robin, in turn, on the same two real workers."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from tests.documents import Burst, questions, send_burst
from tests.engine.test_affinity import is_ready, worker_url
from tests.gateway_process import free_port
from tests.up_process import LOAD_SECONDS, MODEL_NAME, UpProcess
from tests.waiting import until

DOCUMENTS, QUESTIONS, WORDS = 8, 4, 867


def measure(pairs: int) -> dict[str, object]:
    """``pairs`` bursts through each gateway, ABBA, each with documents of its own."""
    with tempfile.TemporaryDirectory() as folder:
        up = UpProcess(Path(folder))
        try:
            until("both workers are ready", lambda: up.all_ready(2), LOAD_SECONDS)
            return _compare(up, pairs)
        finally:
            up.stop()


def _compare(up: UpProcess, pairs: int) -> dict[str, object]:
    port = free_port()
    control = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "gateway", "serve", "--policy", "round_robin"]
    command += ["--port", str(port), "--log-level", "warning"]
    for worker in ("0", "1"):
        command += ["--worker", worker_url(up, worker)]
    process = subprocess.Popen(command)
    try:
        until("the control is ready", lambda: is_ready(control), 30)
        urls = {"prefix_affinity": up.url, "round_robin": control}
        found: dict[str, list[Burst]] = {name: [] for name in urls}
        for pair in range(pairs):
            order = list(urls) if pair % 2 == 0 else list(reversed(urls))
            for turn, name in enumerate(order):
                prompts = questions(1000 + 2 * pair + turn, DOCUMENTS, QUESTIONS, WORDS)
                burst = send_burst(urls[name], MODEL_NAME, prompts)
                found[name].append(burst)
                print(
                    f"pair {pair + 1} {name:16} {burst.requests_per_second:6.2f} requests/s, "
                    f"cached share {burst.cached_share:.3f}",
                    flush=True,
                )
    finally:
        process.terminate()
        process.wait(20)
    return _summary(found)


def _summary(found: dict[str, list[Burst]]) -> dict[str, object]:
    ratios = [
        a.requests_per_second / b.requests_per_second
        for a, b in zip(found["prefix_affinity"], found["round_robin"], strict=True)
    ]
    return {
        "workload": f"{DOCUMENTS} documents x {QUESTIONS} questions, two CPU workers",
        **{
            name: {
                "requests_per_second": round(median(b.requests_per_second for b in bursts), 3),
                "cached_share": round(median(b.cached_share for b in bursts), 3),
            }
            for name, bursts in found.items()
        },
        "ratios": [round(ratio, 3) for ratio in ratios],
        "median_ratio": round(median(ratios), 3),
    }
