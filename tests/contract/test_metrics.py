"""What `/metrics` says of requests and of workers."""

from __future__ import annotations

import uuid

import pytest

from tests.bodies import CHAT, COMPLETIONS, chat, completion, scripted
from tests.contract.expect import Counted, only
from tests.fake_worker import FakeWorker
from tests.gateway_process import GatewayProcess
from tests.raw_http import exchange
from tests.waiting import until

GATEWAY_ARGS = ["--probe-seconds", "0.1", "--max-num-seqs", "8", "--max-num-batched-tokens", "100"]


def engine_metric(gateway: GatewayProcess, name: str) -> list[float]:
    return [v for (sample, _), v in gateway.samples().items() if sample == name]


def test_tokens_and_hit_ratio_are_the_engines(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    names = ["prompt", "predicted_cached", "delivered_cached"]

    def totals() -> list[float]:
        return [gateway.total(f"gateway_{name}_tokens_total") for name in names]

    before = totals()
    text = uuid.uuid4().hex * 100
    usages, predicted = [], 0
    for stream in (False, True, True):
        options = {"stream_options": {"include_usage": True}} if stream else {}
        answer = exchange(gateway.url, CHAT, chat(text, stream=stream, **options))
        usages.append(answer.data()[-2]["usage"] if stream else answer.json()["usage"])
        predicted += int(answer.header("x-gateway-predicted-cached-tokens") or 0)
    delivered = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    assert delivered > 0
    expected = [sum(u["prompt_tokens"] for u in usages), predicted, delivered]
    until(
        f"{names} grew by {expected}",
        lambda: [a - b for a, b in zip(totals(), before, strict=True)] == expected,
    )


def test_usage_is_counted_though_it_is_withheld(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    def told() -> float:
        return sum(worker.engine.prompt_tokens for worker in fake_workers)

    before = gateway.total("gateway_prompt_tokens_total") - told()
    for how in ({}, {"split_bytes": 1}, {"rechunk_bytes": 3}):
        answer = exchange(gateway.url, CHAT, chat(stream=True), headers=scripted(**how))
        assert all(e["choices"] for e in answer.data()[:-1])
    until(
        "3 prompts are counted",
        lambda: gateway.total("gateway_prompt_tokens_total") - told() == before,
    )


@pytest.mark.parametrize("stream", [False, True])
def test_answers_without_usage_are_left_out_of_both_sides(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], stream: bool
) -> None:
    before = gateway.total("gateway_prompt_tokens_total")
    without = gateway.total("gateway_answers_without_usage_total")
    exchange(gateway.url, CHAT, chat(stream=stream), headers=scripted(usage=False))
    until(
        "counted as without",
        lambda: gateway.total("gateway_answers_without_usage_total") == without + 1,
    )
    assert gateway.total("gateway_prompt_tokens_total") == before


def test_outcome_is_counted_for_its_worker(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    for status, outcome in ((200, "ok"), (400, "ok"), (500, "upstream_error"), (503, "refused")):
        answer = exchange(gateway.url, CHAT, chat(), headers=scripted(status=status))
        worker = answer.header("x-gateway-worker") or ""
        counted = gateway.total("gateway_requests_total", outcome=outcome, worker=worker)
        assert answer.status == status
        assert counted > 0


@pytest.mark.parametrize(
    ("prompt", "path"),
    [([1, 2, 3], COMPLETIONS), ([[1, 2], [3]], COMPLETIONS), (["a", "b"], COMPLETIONS)],
)
def test_c30_odd_prompts_are_served(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], prompt: object, path: str
) -> None:
    assert exchange(gateway.url, path, completion(prompt)).status == 200


def test_c68_series_are_bounded_and_carry_nothing_personal(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    def ask(i: int) -> None:
        secret = f"sk-secret-{i}-{uuid.uuid4().hex}"
        headers = [
            ("Authorization", f"Bearer {secret}"),
            ("X-Request-Id", f"id-{i}"),
            ("User-Agent", secret),
        ]
        body = chat(secret, model=f"model-{secret}", user=f"{secret}@example.org")
        for path in (CHAT, COMPLETIONS, f"/v1/{secret}"):
            exchange(gateway.url, path, body, headers=headers)
        exchange(gateway.url, CHAT, chat(secret, stream=bool(i % 2)), headers=headers)

    ask(0)
    ask(1)
    series = set(gateway.samples())
    for i in range(2, 12):
        ask(i)
    assert set(gateway.samples()) == series
    metrics = exchange(gateway.url, "/metrics").body.decode()
    assert "sk-secret" not in metrics and "id-3" not in metrics
    until("the last has its line", lambda: "id=id-11 " in gateway.log())
    assert "sk-secret" not in gateway.log()


def test_c68_worker_that_is_away_is_not_up(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    assert gateway.total("gateway_worker_up") == 2
    fake_workers[1].refuse()
    until("one is up", lambda: gateway.total("gateway_worker_up") == 1)
    assert gateway.total("gateway_worker_up", worker="1") == 0
    until("its engine's figures are absent", lambda: figures_of(gateway, "1") == [])
    fake_workers[1].listen()
    until("both are up", lambda: gateway.total("gateway_worker_up") == 2)


def figures_of(gateway: GatewayProcess, worker: str) -> list[str]:
    return [
        name
        for name, labels in gateway.samples()
        if name.startswith("gateway_engine_") and ("worker", worker) in labels
    ]


@pytest.mark.parametrize("engines", [("0",), ("0", "1")], ids=["one", "two"])
@pytest.mark.parametrize("names", ["new", "old"])
def test_c68_both_names_of_a_metric(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], names: str, engines: tuple[str, ...]
) -> None:
    usage = 0.25 if names == "new" else 0.5
    for worker in fake_workers:
        worker.set(metric_names=names, engine_labels=engines, kv_cache_usage=usage, waiting=3)
    until(
        "the usage of both",
        lambda: engine_metric(gateway, "gateway_engine_kv_cache_usage_ratio") == [usage, usage],
    )
    waiting = 3.0 * len(engines)
    until(
        "requests in the engines' queues",
        lambda: engine_metric(gateway, "gateway_engine_waiting_requests") == [waiting, waiting],
    )
    assert len(engine_metric(gateway, "gateway_engine_cache_hit_ratio")) <= 2


def test_c68_missing_is_absent_not_0(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    for worker in fake_workers:
        worker.set(metric_names="none")
    until("no figures", lambda: not figures_of(gateway, "0") and not figures_of(gateway, "1"))
    assert engine_metric(gateway, "gateway_batch_occupancy_ratio") == []
    assert exchange(gateway.url, CHAT, chat()).status == 200
    for worker in fake_workers:
        worker.set(metric_names="new", engine_labels=("0",), waiting=0, kv_cache_usage=0.0)
    until("figures again", lambda: figures_of(gateway, "0"))


def test_batch_occupancy(gateway: GatewayProcess, fake_workers: list[FakeWorker]) -> None:
    for worker in fake_workers:
        worker.set(metric_names="new", engine_labels=("0",), running=2)
    until(
        "2 of 8 run",
        lambda: engine_metric(gateway, "gateway_batch_occupancy_ratio") == [0.25, 0.25],
    )
    for worker in fake_workers:
        worker.set(running=0)
        worker.engine.steps += [50, 30]
    until(
        "steps of 40 of 100 tokens",
        lambda: any(v > 0 for v in engine_metric(gateway, "gateway_batch_token_occupancy_ratio")),
    )


def test_preemptions_and_the_engines_own_hit_ratio(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    for worker in fake_workers:
        worker.set(preemptions=5, queries_tokens=1000, hits_tokens=750)
    until(
        "5 each", lambda: engine_metric(gateway, "gateway_engine_preemptions_total") == [5.0, 5.0]
    )
    until(
        "three quarters",
        lambda: engine_metric(gateway, "gateway_engine_cache_hit_ratio") == [0.75, 0.75],
    )


def test_c33_every_path_is_counted(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted
) -> None:
    exchange(gateway.url, CHAT, chat())
    for worker in fake_workers:
        worker.reset()
    exchange(gateway.url, COMPLETIONS, completion(stream=True))
    only(fake_workers)
    counted.is_(ok=2)
