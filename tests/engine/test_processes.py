"""Nothing of ours is left behind, and what dies comes back, on real vLLM."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.up_process import LOAD_SECONDS, MODEL_NAME, UpProcess
from tests.waiting import until

pytestmark = pytest.mark.timeout(600)


def test_kill_of_the_gateway_during_model_load(tmp_path: Path) -> None:
    gateway = UpProcess(tmp_path)
    until("engines are loading", lambda: len(gateway.engine_processes()) >= 4, 60)
    gateway.kill()
    until("no process is left", lambda: not gateway.engine_processes(), 20)


def test_kill_of_the_gateway_when_ready(tmp_path: Path) -> None:
    gateway = UpProcess(tmp_path, ["--cpu-workers", "1"])
    until("the worker is ready", lambda: gateway.all_ready(1), LOAD_SECONDS)
    assert len(gateway.engine_processes()) >= 3, "API server, engine core and worker"
    gateway.kill()
    until("no process is left", lambda: not gateway.engine_processes(), 20)


async def stream(client: httpx.AsyncClient, text: str, tokens: int, began: asyncio.Event) -> str:
    """The whole text of a streamed answer; sets ``began`` at its third event."""
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    received: list[str] = []
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            received.append(f"worker {answer.headers['x-gateway-worker']}\n")
            async for chunk in answer.aiter_text():
                received.append(chunk)
                if len(received) > 3:
                    began.set()
    except httpx.RemoteProtocolError:
        received.append("\nbroken off")
    began.set()
    return "".join(received)


async def kill_mid_stream(up: UpProcess) -> list[str]:
    """Four streams on two workers; one worker's API server is killed when all have begun."""
    async with httpx.AsyncClient(base_url=up.url, timeout=180, trust_env=False) as client:
        began = [asyncio.Event() for _ in range(4)]
        tasks = []
        for n, event in enumerate(began):
            tasks.append(
                asyncio.create_task(stream(client, f"{n} tell me a long story", 300, event))
            )
            await event.wait()
        os.kill(up.pid("1", "api_server"), signal.SIGKILL)
        return list(await asyncio.gather(*tasks))


def test_kill_of_a_worker_mid_stream(up: UpProcess) -> None:
    before = up.total("gateway_worker_restarts_total", worker="1")
    generation = up.total("gateway_worker_generation", worker="1")
    old = {pause.pid for pause in up.pauses("1")}
    answers = asyncio.run(kill_mid_stream(up))
    for answer in answers:
        if answer.startswith("worker 0"):
            assert answer.rstrip().endswith("data: [DONE]")
            assert '"error"' not in answer
        else:
            assert answer.endswith("broken off")
            assert answer.count('data: {"error":') == 1
            assert "[DONE]" not in answer and '"finish_reason":"stop"' not in answer
    assert {answer[:8] for answer in answers} == {"worker 0", "worker 1"}
    until("the dead group is gone", lambda: not old & set(up.engine_processes()), 20)
    until("the worker is back", lambda: up.all_ready(2), LOAD_SECONDS)
    until("its events are followed", lambda: up.total("gateway_cache_view", mode="events") == 2, 10)
    assert up.total("gateway_worker_restarts_total", worker="1") == before + 1
    assert up.total("gateway_worker_generation", worker="1") == generation + 1
    assert up.total("gateway_requests_total", outcome="upstream_truncated", worker="1") >= 1
    assert up.total("gateway_in_flight_requests") == 0
