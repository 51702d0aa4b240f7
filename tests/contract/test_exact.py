"""A gateway that reads prompts as exact tokens, before a worker that may read them otherwise."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.prompt.tokenizer import ModelTokenizer, load_tokenizer
from tests.bodies import CHAT, COMPLETIONS, chat, completion, scripted
from tests.conftest import StartGateway
from tests.fake_worker import FakeWorker
from tests.gateway_process import GatewayProcess
from tests.raw_http import exchange
from tests.unit.prompt.test_verify import SHOWS_ALL, ids_of
from tests.unit.prompt.tiny import TEMPLATE, model_folder
from tests.waiting import until

TOOL = {"type": "function", "function": {"name": "f"}}
SILENT = {"usage": False}
"""The fake engine's own count of tokens is none of this tokenizer's."""


def tokenize_with(local: ModelTokenizer) -> Any:
    def tokenize(body: dict[str, Any]) -> dict[str, Any]:
        if "messages" in body:
            return {"tokens": ids_of(local, body)}
        return {"tokens": local.encode(body["prompt"], body["add_special_tokens"])}

    return tokenize


@pytest.fixture
def worker(tmp_path: Any) -> Iterator[FakeWorker]:
    folder = model_folder(tmp_path / "model", chat_template=TEMPLATE)
    with FakeWorker(root=str(folder)) as made:
        made.set(tokenize=tokenize_with(load_tokenizer(folder, None)))
        yield made


def mode(gateway: GatewayProcess) -> str:
    (found,) = [
        dict(labels)["mode"]
        for (name, labels), _ in gateway.samples().items()
        if name == "gateway_prompt_mode"
    ]
    return found


def mismatches(gateway: GatewayProcess) -> float:
    return gateway.total("gateway_prompt_token_mismatches_total", model="fake-model")


def test_a_worker_with_another_template_is_read_as_bytes(
    start_gateway: StartGateway, worker: FakeWorker, tmp_path: Any
) -> None:
    other = load_tokenizer(model_folder(tmp_path / "other"), TEMPLATE.replace("im_start", "s"))
    worker.set(tokenize=tokenize_with(other))
    gateway = start_gateway(workers=[worker.url])
    assert mode(gateway) == "bytes"
    assert mismatches(gateway) > 0
    assert "'chat: one turn'" in gateway.log()


def test_a_worker_whose_template_shows_more_is_read_exactly_as_far_as_it_is_alike(
    start_gateway: StartGateway, worker: FakeWorker, tmp_path: Any
) -> None:
    other = load_tokenizer(model_folder(tmp_path / "other"), SHOWS_ALL)
    worker.set(tokenize=tokenize_with(other))
    gateway = start_gateway(workers=[worker.url])
    assert mode(gateway) == "exact"
    assert mismatches(gateway) > 0
    assert "prompts with tools are read as bytes" in gateway.log()
    assert "'chat: tools'" in gateway.log()
    for fields in ({}, {"tools": [TOOL]}):
        exchange(gateway.url, CHAT, chat(**fields), headers=scripted(**SILENT))
    fallback = "gateway_affinity_fallback_total"
    until("one is read as bytes", lambda: gateway.total(fallback, reason="mismatch") == 1)


def test_an_answer_that_counts_other_tokens_switches_the_model(
    start_gateway: StartGateway, worker: FakeWorker
) -> None:
    gateway = start_gateway(workers=[worker.url])
    assert (mode(gateway), mismatches(gateway)) == ("exact", 0)
    exchange(gateway.url, CHAT, chat("a secret"), headers=scripted(**SILENT))
    assert (mode(gateway), mismatches(gateway)) == ("exact", 0)
    exchange(gateway.url, CHAT, chat("a secret", stream=True))
    until("the mismatch is counted", lambda: mismatches(gateway) == 1)
    assert mode(gateway) == "bytes"
    assert "all its prompts are read as bytes" in gateway.log()
    assert "secret" not in gateway.log()
    exchange(gateway.url, CHAT, chat("a secret"))
    fallback = "gateway_affinity_fallback_total"
    until("it is read as bytes", lambda: gateway.total(fallback, reason="mismatch") == 1)


def test_an_answer_that_is_not_whole_says_nothing(
    start_gateway: StartGateway, worker: FakeWorker
) -> None:
    """Its last event may count the tokens of one prompt of several."""
    gateway = start_gateway(workers=[worker.url])
    for cut in ("fin", "clean"):
        how = scripted(cut=cut, cut_after=3)
        answer = exchange(
            gateway.url, COMPLETIONS, completion(["a", "b"], stream=True), headers=how
        )
        assert answer.end == "cut"
    truncated = "upstream_truncated"
    until(
        "both are counted",
        lambda: gateway.total("gateway_requests_total", outcome=truncated) == 2,
    )
    assert (mode(gateway), mismatches(gateway)) == ("exact", 0)


def test_an_odd_kind_of_request_is_switched_alone(
    start_gateway: StartGateway, worker: FakeWorker
) -> None:
    gateway = start_gateway(workers=[worker.url])
    exchange(gateway.url, CHAT, chat(tools=[TOOL], documents=[]))
    until("the mismatch is counted", lambda: mismatches(gateway) == 1)
    assert mode(gateway) == "exact"
    assert "prompts of the kind chat+documents+tools are read as bytes" in gateway.log()
    exchange(gateway.url, CHAT, chat(), headers=scripted(**SILENT))
    exchange(gateway.url, CHAT, chat(tools=[TOOL]), headers=scripted(**SILENT))
    exchange(gateway.url, CHAT, chat(tools=[TOOL], documents=[]))
    fallback = "gateway_affinity_fallback_total"
    until("it is read as bytes", lambda: gateway.total(fallback, reason="mismatch") == 1)
    assert gateway.total(fallback) == 1


def test_a_sample_that_the_worker_reads_otherwise_switches_the_model(
    start_gateway: StartGateway, worker: FakeWorker
) -> None:
    gateway = start_gateway("--token-check-seconds", "0.1", workers=[worker.url])
    assert mode(gateway) == "exact"
    worker.set(tokenize=lambda body: {"tokens": [1, 2, 3]})

    def switched() -> bool:
        exchange(gateway.url, COMPLETIONS, completion("Hi"), headers=scripted(**SILENT))
        return mode(gateway) == "bytes"

    until("a sample was compared", switched)
    assert mismatches(gateway) == 1


def test_c12_long_prompts_hold_up_nobody(start_gateway: StartGateway, worker: FakeWorker) -> None:
    """300,000 tokens at a time, each prompt new: on the loop it would stand still for 0.4 s."""
    gateway = start_gateway(workers=[worker.url])
    chance = random.Random(12)
    words = ["".join(chance.choices("abcdefghij", k=4)) for _ in range(500)]
    done = threading.Event()

    def keep_asking() -> None:
        while not done.wait(0.1):
            text = " ".join(chance.choices(words, k=60_000))
            answer = exchange(gateway.url, CHAT, chat(text), headers=scripted(**SILENT))
            assert answer.status == 200

    waits: list[float] = []
    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        for _ in range(60):
            began = time.monotonic()
            assert exchange(gateway.url, "/health").status == 200
            waits.append(time.monotonic() - began)
            done.wait(0.05)
    finally:
        done.set()
        asking.join()
    waits.sort()
    print(f"/health: median {waits[30]:.4f} s, worst {waits[-1]:.4f} s")
    assert waits[-2] < 0.1
    assert not gateway.total("gateway_affinity_fallback_total"), "they were read exactly"
