"""Workers that are away: another one serves, or the client is told at once."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.bodies import CHAT, COMPLETIONS, chat, completion, scripted
from tests.conftest import StartGateway
from tests.contract.conftest import check_nothing_left
from tests.contract.expect import Counted, assert_openai_error
from tests.fake_worker import FakeWorker
from tests.gateway_process import GatewayProcess, free_port
from tests.raw_http import RawClient, exchange
from tests.waiting import until

GATEWAY_ARGS = ["--probe-seconds", "0.1"]
SLOW_PROBES = ["--probe-seconds", "60"]  # only requests find out that a worker is away
AT_ONCE_SECONDS = 1.0
LOSSES = "gateway_worker_cache_losses_total"


def wait_up(gateway: GatewayProcess, worker: str, up: float) -> None:
    until(
        f"worker {worker} up {up:g}",
        lambda: gateway.total("gateway_worker_up", worker=worker) == up,
        10,
    )


def documents_on(gateway: GatewayProcess, worker: str, count: int) -> list[str]:
    """Prompts whose prefix is warm on this worker."""
    found: list[str] = []
    for i in range(20 * count):
        text = f"{i} document {time.monotonic_ns()} " * 20
        if exchange(gateway.url, CHAT, chat(text)).header("x-gateway-worker") == worker:
            found.append(text)
        if len(found) == count:
            return found
    raise AssertionError(f"worker {worker} got only {len(found)} of {20 * count}")


def test_c45_refused_goes_to_the_next_worker_unseen(
    start_gateway: StartGateway, fake_workers: list[FakeWorker]
) -> None:
    gateway = start_gateway(*SLOW_PROBES, workers=[w.url for w in fake_workers])
    gateway.wait_up(2)
    documents = documents_on(gateway, "1", 10)
    counted = Counted(gateway)
    fake_workers[1].refuse()
    for i in range(50):
        body = chat(documents[i % 10] + f"{i}?", stream=bool(i % 2))
        answer = exchange(gateway.url, CHAT, body)
        assert (answer.status, answer.end) == (200, "complete")
        assert answer.header("x-gateway-worker") == "0"
    counted.is_(ok=50)
    assert gateway.total("gateway_requests_total", outcome="ok", worker="0") >= 50
    check_nothing_left(gateway, fake_workers)


@contextmanager
def black_hole(port: int) -> Iterator[None]:
    """A port that answers no SYN: its queue of connections is full and nobody accepts."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        yield


def test_c45_no_connection_within_the_limit_goes_to_the_next_worker(
    start_gateway: StartGateway, fake_workers: list[FakeWorker]
) -> None:
    limit = ["--connect-seconds", "0.5"]
    gateway = start_gateway(*SLOW_PROBES, *limit, workers=[w.url for w in fake_workers])
    gateway.wait_up(2)
    (document,) = documents_on(gateway, "1", 1)
    fake_workers[1].refuse()
    with black_hole(fake_workers[1].port):
        answer = exchange(gateway.url, CHAT, chat(document), seconds=5)
    assert (answer.status, answer.header("x-gateway-worker")) == (200, "0")
    check_nothing_left(gateway, fake_workers)


def test_c45_affinity_is_bound_anew_and_the_worker_comes_back(
    start_gateway: StartGateway, fake_workers: list[FakeWorker]
) -> None:
    gateway = start_gateway(*GATEWAY_ARGS, workers=[w.url for w in fake_workers])
    gateway.wait_up(2)
    (document,) = documents_on(gateway, "1", 1)
    fake_workers[1].refuse()
    wait_up(gateway, "1", 0)
    assert exchange(gateway.url, CHAT, chat(document)).header("x-gateway-worker") == "0"
    fake_workers[1].listen()
    wait_up(gateway, "1", 1)
    again = exchange(gateway.url, CHAT, chat(document + "And?"))
    assert again.status == 200
    documents_on(gateway, "1", 1)


def test_c18_restart_behind_the_same_address_drops_its_blocks(
    start_gateway: StartGateway, fake_workers: list[FakeWorker]
) -> None:
    gateway = start_gateway(*GATEWAY_ARGS, workers=[w.url for w in fake_workers])
    gateway.wait_up(2)
    worker = fake_workers[1]
    (document,) = documents_on(gateway, "1", 1)
    warm = exchange(gateway.url, CHAT, chat(document))
    assert int(warm.header("x-gateway-predicted-cached-tokens") or 0) > 0
    generation = gateway.total("gateway_worker_generation", worker="1")
    worker.refuse()
    wait_up(gateway, "1", 0)
    worker.engine.cache.clear()
    worker.set(process_start_seconds=worker.engine.process_start_seconds + 60)
    worker.listen()
    wait_up(gateway, "1", 1)
    assert gateway.total("gateway_worker_generation", worker="1") > generation
    fake_workers[0].refuse()
    wait_up(gateway, "0", 0)
    cold = exchange(gateway.url, CHAT, chat(document))
    assert cold.header("x-gateway-worker") == "1"
    assert cold.header("x-gateway-predicted-cached-tokens") == "0"


def test_c18_a_cache_reset_behind_our_back_is_noticed(
    start_gateway: StartGateway, fake_workers: list[FakeWorker]
) -> None:
    gateway = start_gateway(workers=[fake_workers[0].url])
    gateway.wait_up(1)
    documents = [f"{i} document {time.monotonic_ns()} " * 20 for i in range(6)]

    def predicted(document: str) -> int:
        answer = exchange(gateway.url, CHAT, chat(document))
        return int(answer.header("x-gateway-predicted-cached-tokens") or 0)

    assert [predicted(document) for document in documents] == [0] * 6
    assert all(predicted(document) > 0 for document in documents)
    fake_workers[0].engine.cache.clear()
    assert all(predicted(document) > 0 for document in documents[:3]), "nobody has said anything"
    until("it is noticed", lambda: gateway.total(LOSSES, reason="over_predicted") == 1)
    assert predicted(documents[5]) == 0
    assert predicted(documents[0]) > 0, "computed since"
    assert gateway.total("gateway_worker_up") == 1
    check_nothing_left(gateway, fake_workers[:1])


def test_c18_a_worker_that_sleeps_is_left_out_and_wakes_up_with_nothing(
    start_gateway: StartGateway, fake_workers: list[FakeWorker]
) -> None:
    every = ["--scrape-seconds", "0.1"]
    gateway = start_gateway(*GATEWAY_ARGS, *every, workers=[w.url for w in fake_workers])
    gateway.wait_up(2)
    (document,) = documents_on(gateway, "1", 1)
    fake_workers[1].set(sleep_state="weights_offloaded")
    wait_up(gateway, "1", 0)
    assert exchange(gateway.url, CHAT, chat(document)).header("x-gateway-worker") == "0"
    reasons = exchange(gateway.url, "/ready").json()["workers"]
    fake_workers[1].set(sleep_state="awake")
    wait_up(gateway, "1", 1)
    assert reasons["1"] == "asleep"
    assert gateway.total(LOSSES, worker="1", reason="slept") == 1
    assert gateway.total("gateway_index_blocks", worker="1") == 0


def test_unhealthy_worker_is_left_out_until_it_is_well(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    fake_workers[0].set(health=500)
    wait_up(gateway, "0", 0)
    for i in range(6):
        assert exchange(gateway.url, CHAT, chat(f"{i}")).header("x-gateway-worker") == "1"
    fake_workers[0].set(health=200)
    wait_up(gateway, "0", 1)


def test_streams_of_the_other_worker_go_on(
    start_gateway: StartGateway, fake_workers: list[FakeWorker]
) -> None:
    in_turn = ["--policy", "round_robin"]
    gateway = start_gateway(*GATEWAY_ARGS, *in_turn, workers=[w.url for w in fake_workers])
    gateway.wait_up(2)
    counted = Counted(gateway)
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(gateway.url)) for _ in range(6)]
        for i, client in enumerate(clients):
            body = json.dumps(chat(f"{i}", stream=True)).encode()
            client.send("POST", CHAT, body, scripted(gates={"3": "on"}))
        answers = [client.read_head() for client in clients]
        for client, answer in zip(clients, answers, strict=True):
            client.read_events(answer, 3)
        dying = [a for a in answers if a.header("x-gateway-worker") == "1"]
        assert len(dying) == 3
        fake_workers[1].refuse()
        fake_workers[0].open_gate("on")
        for client, answer in zip(clients, answers, strict=True):
            for _ in client.read_pieces(answer):
                pass
    for answer in answers:
        if answer in dying:
            assert answer.end == "cut"
            assert b'data: {"error":' in answer.body
        else:
            assert (answer.end, answer.data()[-1]) == ("complete", "[DONE]")
    counted.is_(ok=3, upstream_truncated=3)
    check_nothing_left(gateway, fake_workers)


def test_c62_models_of_the_workers_that_are_up(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    theirs = exchange(fake_workers[0].url, "/v1/models").json()["data"]
    assert exchange(gateway.url, "/v1/models").json()["data"] == theirs
    fake_workers[1].refuse()
    wait_up(gateway, "1", 0)
    assert exchange(gateway.url, "/v1/models").json()["data"] == theirs


def test_c62_union_of_different_workers(start_gateway: StartGateway) -> None:
    with FakeWorker(model="org/name") as one, FakeWorker(model="other") as two:
        three = FakeWorker(model="other", max_model_len=1024)
        with three:
            gateway = start_gateway(workers=[one.url, two.url, three.url])
            gateway.wait_up(3)
            cards = {c["id"]: c for c in exchange(gateway.url, "/v1/models").json()["data"]}
            assert cards.keys() == {"org/name", "other"}
            assert cards["other"]["max_model_len"] == 1024
            assert exchange(gateway.url, "/v1/models/org/name").json()["id"] == "org/name"
            assert exchange(gateway.url, "/v1/models/org%2Fname").json()["id"] == "org/name"
            assert_openai_error(exchange(gateway.url, "/v1/models/none"), 404)
            for _ in range(4):
                answer = exchange(gateway.url, CHAT, chat(model="org/name"))
                assert (answer.status, answer.header("x-gateway-worker")) == (200, "0")
            gateway.stop()


@pytest.fixture(scope="module")
def alone(start_module_gateway: StartGateway) -> GatewayProcess:
    """A gateway whose workers never came up."""
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    return start_module_gateway(*GATEWAY_ARGS, workers=urls, ready=503)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_c16_no_worker_at_all(alone: GatewayProcess, stream: bool, path: str) -> None:
    assert exchange(alone.url, "/health").status == 200
    ready = exchange(alone.url, "/ready")
    assert ready.status == 503
    assert b"refused" in ready.body or b"unreachable" in ready.body, "no reason given"
    models = exchange(alone.url, "/v1/models")
    assert_openai_error(models, 503)
    counted = Counted(alone)
    started = time.monotonic()
    body = (chat if path == CHAT else completion)(stream=stream)
    answer = exchange(alone.url, path, body)
    assert time.monotonic() - started < AT_ONCE_SECONDS
    assert_openai_error(answer, 503)
    assert int(answer.header("retry-after") or 0) > 0
    counted.is_(refused=1)


@pytest.mark.parametrize("stream", [False, True])
def test_c16_c05_all_workers_die(
    start_gateway: StartGateway, fake_workers: list[FakeWorker], stream: bool
) -> None:
    gateway = start_gateway(*SLOW_PROBES, workers=[w.url for w in fake_workers])
    assert exchange(gateway.url, CHAT, chat()).status == 200
    for worker in fake_workers:
        worker.refuse()
    for _ in range(2):  # the first finds out, the second is told so
        started = time.monotonic()
        answer = exchange(gateway.url, CHAT, chat(stream=stream))
        assert time.monotonic() - started < AT_ONCE_SECONDS
        assert_openai_error(answer, 503)
        assert int(answer.header("retry-after") or 0) > 0
    assert exchange(gateway.url, "/ready").status == 503
    assert exchange(gateway.url, "/health").status == 200


def test_gateway_that_starts_before_its_workers(start_gateway: StartGateway) -> None:
    with FakeWorker() as worker:
        worker.refuse()
        gateway = start_gateway(*GATEWAY_ARGS, workers=[worker.url], ready=503)
        worker.listen()
        gateway.wait_ready()
        assert exchange(gateway.url, CHAT, chat()).status == 200
        gateway.stop()
