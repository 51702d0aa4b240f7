"""GC pauses of vLLM's processes, seen through the gateway."""

from __future__ import annotations

import os
import signal

import pytest

from tests.up_process import UpProcess
from tests.waiting import until

pytestmark = pytest.mark.timeout(420)

COUNT = "gateway_gc_pause_seconds_count"


def full_collections(up: UpProcess) -> dict[tuple[str, str], float]:
    """(worker, process) -> full collections so far, by the gateway's metrics."""
    return {
        (labels["worker"], labels["process"]): value
        for (name, pairs), value in up.samples().items()
        if name == COUNT and (labels := dict(pairs))["generation"] == "2"
    }


def test_every_vllm_process_is_there(up: UpProcess) -> None:
    processes = set(full_collections(up))
    assert ("gateway", "gateway") in processes
    for worker in ("0", "1"):
        assert {(worker, "api_server"), (worker, "engine_core")} <= processes


def test_a_collection_moves_its_process_and_no_other(up: UpProcess) -> None:
    before = full_collections(up)
    os.kill(up.pid("0", "engine_core"), signal.SIGUSR1)
    moved = until(
        "the engine core's histogram moves",
        lambda: {k for k, v in full_collections(up).items() if v != before.get(k)},
    )
    assert moved == {("0", "engine_core")}
    assert full_collections(up)["0", "engine_core"] == before["0", "engine_core"] + 1
