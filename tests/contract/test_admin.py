"""Admin endpoints: off unless asked for, and what they do to every worker."""

from __future__ import annotations

import uuid
from contextlib import ExitStack

from tests.bodies import CHAT, chat, scripted
from tests.conftest import StartGateway
from tests.contract.expect import assert_openai_error
from tests.fake_worker import FakeWorker
from tests.gateway_process import GatewayProcess
from tests.raw_http import RawClient, exchange
from tests.waiting import until

RESET = "/admin/reset_prefix_cache"


def test_they_are_off_unless_asked_for(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    answer = exchange(gateway.url, RESET, b"")
    assert_openai_error(answer, 501)
    assert b"--admin-endpoints" in answer.body


def test_c18_a_reset_through_us_drops_what_the_workers_had(
    start_gateway: StartGateway, fake_workers: list[FakeWorker]
) -> None:
    gateway = start_gateway("--admin-endpoints", "true", workers=[w.url for w in fake_workers])
    gateway.wait_up(2)
    text = uuid.uuid4().hex * 100

    def predicted() -> int:
        answer = exchange(gateway.url, CHAT, chat(text))
        return int(answer.header("x-gateway-predicted-cached-tokens") or -1)

    assert predicted() == 0 < predicted()
    not_served = exchange(gateway.url, RESET, b"")
    assert not_served.status == 502
    assert not_served.json()["workers"]["0"] == "/reset_prefix_cache answers 404"
    assert predicted() > 0, "nothing was reset"
    for worker in fake_workers:
        worker.set(dev_mode=True)
    answer = exchange(gateway.url, RESET, b"")
    assert (answer.status, answer.json()) == (200, {"workers": {"0": "reset", "1": "reset"}})
    assert gateway.total("gateway_worker_cache_losses_total", reason="reset") == 2
    assert predicted() == 0 < predicted()
    for worker in fake_workers:
        worker.set(dev_mode=False)


def test_a_worker_that_is_busy_says_so_and_keeps_what_it_has(
    start_gateway: StartGateway, fake_workers: list[FakeWorker]
) -> None:
    worker = fake_workers[0]
    gateway = start_gateway("--admin-endpoints", "true", workers=[worker.url])
    gateway.wait_up(1)
    worker.set(dev_mode=True)
    with ExitStack() as stack:
        client = stack.enter_context(RawClient(gateway.url))
        body = b'{"model":"fake-model","messages":[{"role":"user","content":"x"}],"stream":true}'
        client.send("POST", CHAT, body, scripted(gates={"2": "on"}))
        until("it runs", lambda: worker.engine.running == 1)
        answer = exchange(gateway.url, RESET, b"")
        assert answer.status == 502
        assert answer.json() == {"workers": {"0": "blocks are in use by running requests"}}
        worker.open_gate("on")
        assert client.read().status == 200
    assert gateway.total("gateway_worker_cache_losses_total", reason="reset") == 0
    worker.set(dev_mode=False)
