"""`POST /route/explain` and `gateway explain`: told as it would be placed, and nothing is sent."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.bodies import CHAT, COMPLETIONS, chat, completion, scripted
from tests.conftest import StartGateway
from tests.contract.expect import Counted, assert_openai_error
from tests.fake_worker import FakeWorker
from tests.gateway_process import GatewayProcess
from tests.raw_http import exchange
from tests.waiting import until

EXPLAIN = "/route/explain"
GATEWAY_ARGS = ["--max-body-bytes", "1000000"]


def told(gateway: GatewayProcess, body: dict[str, Any]) -> dict[str, Any]:
    answer = exchange(gateway.url, EXPLAIN, body)
    assert (answer.status, answer.header("content-type")) == (200, "application/json")
    return dict(answer.json())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_request_goes_where_it_was_told(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], path: str
) -> None:
    make = chat if path == CHAT else completion
    text = uuid.uuid4().hex * 300
    sent = sum(len(worker.inference) for worker in fake_workers)
    for cached in (False, True):
        before = told(gateway, make(text))
        answer = exchange(gateway.url, path, make(text))
        assert answer.header("x-gateway-worker") == before["worker"]
        chosen = next(c for c in before["candidates"] if c["worker"] == before["worker"])
        predicted = int(answer.header("x-gateway-predicted-cached-tokens") or -1)
        assert predicted == chosen["cached_tokens"]
        assert (predicted > 0) == cached
        assert before["prompt_tokens"] == chosen["cached_tokens"] + chosen["uncached_tokens"]
        assert before["mode"] == "bytes" and before["fallback"] == "no_tokenizer"
    assert sum(len(worker.inference) for worker in fake_workers) == sent + 2


def test_every_worker_and_each_term_of_its_cost_is_there(
    gateway: GatewayProcess, counted: Counted
) -> None:
    answer = told(gateway, chat("hello"))
    assert [c["worker"] for c in answer["candidates"]] == ["0", "1"]
    assert answer["worker"] in answer["reason"]
    for one in answer["candidates"]:
        terms = ("prefill_ahead", "decode", "prefill", "delay_to_others")
        total = sum(one[f"{term}_seconds"] for term in terms)
        assert one["cost_seconds"] == pytest.approx(total) and one["available"]


@pytest.mark.parametrize("body", [b"", b"[]", b'"x"', b"{", b"\xff"])
def test_what_is_no_object_is_refused(gateway: GatewayProcess, body: bytes) -> None:
    assert_openai_error(exchange(gateway.url, EXPLAIN, body), 400)


def test_the_limit_of_bodies_holds(gateway: GatewayProcess) -> None:
    assert_openai_error(exchange(gateway.url, EXPLAIN, b"x" * 1_000_001), 413)


@pytest.mark.parametrize("body", [{}, {"messages": 5}, {"prompt": None}, {"messages": [[[]]]}])
def test_odd_bodies_are_placed_by_what_is_known_of_them(
    gateway: GatewayProcess, body: dict[str, Any]
) -> None:
    assert told(gateway, body)["worker"] in ("0", "1")


def command(gateway: GatewayProcess, *arguments: str, given: bytes = b"") -> tuple[int, str, str]:
    ran = subprocess.run(
        [sys.executable, "-m", "gateway", "explain", *arguments, "--url", gateway.url],
        input=given, capture_output=True, timeout=60,
    )  # fmt: skip
    return ran.returncode, ran.stdout.decode(), ran.stderr.decode()


def test_the_command_shows_it(gateway: GatewayProcess, tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps(chat("hello")))
    status, out, err = command(gateway, str(file))
    assert (status, err) == (0, "")
    assert "goes here" in out and "read as bytes (no_tokenizer)" in out
    status, out, _ = command(gateway, "-", "--json", given=file.read_bytes())
    assert status == 0 and json.loads(out)["worker"] in ("0", "1")


def test_the_command_says_what_is_wrong(gateway: GatewayProcess, tmp_path: Path) -> None:
    missing = tmp_path / "missing.json"
    status, _, err = command(gateway, str(missing))
    assert (status, err.strip()) == (2, f"error: {missing}: No such file or directory")
    status, _, err = command(gateway, "-", given=b"nonsense")
    assert status == 2 and "the body is not a JSON object" in err


def test_a_request_that_asks_is_told_its_placement_in_a_header(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    body = chat(uuid.uuid4().hex * 300, stream=True)
    assert exchange(gateway.url, CHAT, body).header("x-gateway-placement") is None
    answer = exchange(gateway.url, CHAT, body, headers=[("X-Gateway-Debug", "1")])
    placement = json.loads(answer.header("x-gateway-placement") or "")
    assert placement["worker"] == answer.header("x-gateway-worker")
    (chosen,) = [c for c in placement["candidates"] if c["worker"] == placement["worker"]]
    assert str(chosen["cached_tokens"]) == answer.header("x-gateway-predicted-cached-tokens")
    assert chosen["cached_tokens"] > 0 and len(placement["candidates"]) == 2
    received = [one for worker in fake_workers for one in worker.inference]
    assert not any(one.header("x-gateway-debug") for one in received), "it is for the gateway"


def request_lines(gateway: GatewayProcess) -> list[dict[str, str]]:
    """The log's lines of requests, as their keys and values."""
    found = []
    for line in gateway.log().splitlines():
        _, mark, pairs = line.partition(" INFO request: ")
        if mark:
            found.append(dict(pair.split("=", 1) for pair in pairs.split(" ")))
    return found


def test_the_request_log_has_what_a_simulation_needs_and_no_text(
    start_gateway: StartGateway, fake_workers: list[FakeWorker], tmp_path: Path
) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text("")
    gateway = start_gateway(
        "--request-log", str(file), workers=[worker.url for worker in fake_workers]
    )
    gateway.wait_up(2)
    secret = uuid.uuid4().hex
    for text in (secret * 100, secret * 100 + "more" * 200, "too short for a block"):
        exchange(gateway.url, CHAT, chat(text, max_tokens=3))
    exchange(gateway.url, CHAT, chat(secret * 100), headers=scripted(status=500))
    gateway.stop()
    first, second = [json.loads(line) for line in file.read_text().splitlines()]
    assert secret not in file.read_text()
    assert first["timestamp"] <= first["finished"] <= second["finished"]
    assert (first["output_length"], first["block_size"]) == (3, 128)
    assert len(first["hash_ids"]) == first["input_length"] // first["block_size"]
    assert second["hash_ids"][:5] == first["hash_ids"][:5]


def test_a_request_log_that_cannot_be_written_is_told_at_start(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gateway", "serve", "--worker", "http://127.0.0.1:1"]
    command += ["--port", "0", "--request-log", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert f"request log {tmp_path}: Is a directory" in ended.stderr


def test_each_request_leaves_one_line_without_a_word_of_its_text(
    start_gateway: StartGateway, fake_workers: list[FakeWorker]
) -> None:
    gateway = start_gateway(workers=[worker.url for worker in fake_workers])
    gateway.wait_up(2)
    secret = uuid.uuid4().hex
    for stream in (False, True):
        exchange(gateway.url, CHAT, chat(secret * 100, stream=stream))
    exchange(gateway.url, CHAT, chat(secret), headers=scripted(status=500))
    until("all have their line", lambda: len(request_lines(gateway)) == 3)
    plain, stream, failed = request_lines(gateway)
    assert plain["predicted_tokens"] == "0" and int(stream["predicted_tokens"]) > 0
    assert int(stream["delivered_tokens"]) > 0 and stream["worker"] == plain["worker"]
    assert {one["outcome"] for one in (plain, stream)} == {"ok"}
    assert failed["outcome"] == "upstream_error" and "prompt_tokens" not in failed
    costs = dict(one.split(":") for one in stream["cost_seconds"].split(","))
    assert min(costs, key=lambda worker: float(costs[worker])) == stream["worker"]
    assert secret not in gateway.log()


def test_a_shadow_policy_tells_what_it_would_have_done_and_changes_nothing(
    start_gateway: StartGateway, fake_workers: list[FakeWorker]
) -> None:
    gateway = start_gateway(
        "--shadow-policy", "round_robin", workers=[worker.url for worker in fake_workers]
    )
    gateway.wait_up(2)
    text = uuid.uuid4().hex * 300
    answers = [exchange(gateway.url, CHAT, chat(text)) for _ in range(5)]
    (home,) = {answer.header("x-gateway-worker") for answer in answers}
    predicted = [int(a.header("x-gateway-predicted-cached-tokens") or -1) for a in answers]
    elsewhere = [i for i in range(5) if str(i % 2) != home]

    def total(name: str, **labels: str) -> float:
        return gateway.total(f"gateway_shadow_{name}_total", policy="round_robin", **labels)

    until("all are counted", lambda: total("placements") == 5)
    assert total("placements", agrees="no") == len(elsewhere)
    assert total("lost_cached_tokens") == sum(predicted[i] for i in elsewhere) > 0
    assert total("gained_cached_tokens") == 0


def test_a_gateway_without_workers_tells_that_there_are_none(start_gateway: StartGateway) -> None:
    gateway = start_gateway(workers=[], ready=503)
    assert told(gateway, chat())["reason"] == "there is no worker"
    answer = exchange(gateway.url, CHAT, chat(), headers=[("X-Gateway-Debug", "1")])
    assert_openai_error(answer, 503)
