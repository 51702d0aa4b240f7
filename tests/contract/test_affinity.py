"""Which prompts meet in a cache and which are kept apart, seen from outside."""

from __future__ import annotations

import subprocess
import sys
import uuid
from typing import Any

import pytest

from tests.bodies import CHAT, chat
from tests.fake_worker import FakeWorker
from tests.gateway_process import GatewayProcess
from tests.raw_http import Answer, exchange

BLOCK_BYTES = 512


def predicted(answer: Answer) -> int:
    assert answer.status == 200
    return int(answer.header("x-gateway-predicted-cached-tokens") or -1)


def test_c32_a_conversation_that_grows_stays_where_it_is(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    """Its first turns have no full block: nothing waits for a match of some least length."""
    messages: list[dict[str, Any]] = []
    homes, found = [], []
    for turn in range(12):
        messages.append({"role": "user", "content": f"{turn} " + uuid.uuid4().hex * (4 * turn)})
        answer = exchange(gateway.url, CHAT, {**chat(), "messages": messages})
        homes.append(answer.header("x-gateway-worker"))
        found.append(predicted(answer))
        messages.append({"role": "assistant", "content": "I see."})
        exchange(gateway.url, CHAT, chat(uuid.uuid4().hex * 50))  # somebody else's
    long = next(turn for turn, cached in enumerate(found) if cached)
    assert long <= 4
    assert all(found[long:]) and found[long:] == sorted(found[long:])
    assert len(set(homes[long - 1 :])) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_c53_adapters_and_salts_have_caches_of_their_own(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], stream: bool
) -> None:
    for worker in fake_workers:
        worker.set(adapters=["an-adapter"])
    text = uuid.uuid4().hex * 60
    kinds: list[dict[str, Any]] = [
        {},
        {"model": "an-adapter"},
        {"cache_salt": "x"},
        {"cache_salt": "y"},
        {"model": "an-adapter", "cache_salt": "x"},
    ]
    for kind in kinds:
        body = {**chat(text, stream=stream), **kind}
        first, second = (exchange(gateway.url, CHAT, body) for _ in range(2))
        assert predicted(first) == 0, kind
        assert predicted(second) > 0, kind
        assert first.header("x-gateway-worker") == second.header("x-gateway-worker"), kind
    for worker in fake_workers:
        worker.set(adapters=[])


def test_c53_a_salt_is_forwarded_and_never_told(
    start_gateway: Any, fake_workers: list[FakeWorker]
) -> None:
    gateway = start_gateway("--log-level", "debug", workers=[fake_workers[0].url])
    gateway.wait_up(1)
    salt = uuid.uuid4().hex
    exchange(gateway.url, CHAT, chat("x" * 2000, cache_salt=salt))
    assert salt.encode() in fake_workers[0].inference[-1].body
    metrics = exchange(gateway.url, "/metrics").body
    gateway.stop()
    assert salt not in gateway.log() and salt.encode() not in metrics


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ([("X-Claude-Code-Session-Id", "s-1")], {"user": "everybody"}),
        ([("x-session-id", "s-2")], {}),
        ([], {"prompt_cache_key": "s-3"}),
        ([], {"user": "s-4"}),
    ],
    ids=["claude code", "x-session-id", "prompt_cache_key", "user"],
)
def test_c56_a_session_whose_prompts_share_no_block_stays_and_is_counted(
    gateway: GatewayProcess,
    fake_workers: list[FakeWorker],
    headers: list[tuple[str, str]],
    fields: dict[str, Any],
) -> None:
    def turn() -> str | None:
        body = chat(uuid.uuid4().hex + " is the time." + "x" * 2000, **fields)
        answer = exchange(gateway.url, CHAT, body, headers=headers)
        assert predicted(answer) == 0
        return answer.header("x-gateway-worker")

    before = gateway.total("gateway_session_divergences_total")
    assert len({turn() for _ in range(6)}) == 1
    assert gateway.total("gateway_session_divergences_total") == before + 5
    bodies = [one.body for worker in fake_workers for one in worker.inference]
    assert all(b"is the time" in body for body in bodies), "nothing is stripped"


def test_c36_a_second_routing_process_is_refused_with_the_reason() -> None:
    command = [sys.executable, "-m", "gateway", "serve", "--worker", "http://127.0.0.1:1"]
    ended = subprocess.run([*command, "--workers", "2"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "one process" in ended.stderr
