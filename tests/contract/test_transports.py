"""Ways to a worker: IPv6, TLS, a path before its own, and never through a proxy."""

from __future__ import annotations

import json
import ssl
import time
from pathlib import Path

import pytest

from tests.bodies import CHAT, chat, scripted
from tests.certificates import Authority
from tests.conftest import StartGateway
from tests.contract.conftest import check_nothing_left
from tests.contract.expect import Counted, assert_in_band_error, only, wait_only
from tests.contract.test_wire import less_usage
from tests.fake_worker import FakeWorker
from tests.gateway_process import GatewayProcess, free_port
from tests.raw_http import RawClient, exchange
from tests.waiting import until

PROBES = ["--probe-seconds", "0.1"]


def worker_at(host: str, tls: ssl.SSLContext | None = None) -> FakeWorker:
    worker = FakeWorker()
    worker.host, worker.tls = host, tls
    return worker


def check_served(gateway: GatewayProcess, worker: FakeWorker, authority: str) -> None:
    """Plain and streamed answers, one that is cut, a client that leaves, a big body and answer."""
    counted = Counted(gateway)
    for stream in (False, True):
        worker.reset()
        answer = exchange(gateway.url, CHAT, chat(stream=stream))
        said = bytes(only([worker]).answer)
        assert answer.body == (less_usage(said) if stream else said)
        assert only([worker]).values("host") == [authority]
    worker.reset()
    cut = exchange(gateway.url, CHAT, chat(stream=True), headers=scripted(cut="fin", cut_after=3))
    assert_in_band_error(cut)
    worker.reset()
    with RawClient(gateway.url) as client:
        raw = json.dumps(chat(stream=True)).encode()
        client.send("POST", CHAT, raw, scripted(gates={"2": "never"}))
        client.read_events(client.read_head(), 2)
        _, request = wait_only([worker])
        left_at = time.monotonic()
    assert worker.wait_peer_closed(request) - left_at < 1
    worker.reset()
    script = scripted(size_bytes=5_000_000)
    big = exchange(gateway.url, CHAT, chat("x" * 3_000_000), headers=script, seconds=30)
    assert (big.status, big.end, len(big.body)) == (200, "complete", 5_000_000)
    counted.is_(ok=3, upstream_truncated=1, client_gone=1)
    check_nothing_left(gateway, [worker])
    gateway.stop()


def test_ipv6_worker(start_gateway: StartGateway) -> None:
    with worker_at("::1") as worker:
        gateway = start_gateway(workers=[worker.url])
        check_served(gateway, worker, f"[::1]:{worker.port}")


def test_ipv6_worker_that_is_away_and_comes_back(start_gateway: StartGateway) -> None:
    with worker_at("::1") as worker:
        worker.refuse()
        gateway = start_gateway(*PROBES, workers=[worker.url], ready=503)
        worker.listen()
        gateway.wait_ready()
        assert exchange(gateway.url, CHAT, chat()).status == 200
        gateway.stop()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_tls_worker(start_gateway: StartGateway, tmp_path: Path, address: str) -> None:
    authority = Authority(tmp_path)
    trust = {"SSL_CERT_FILE": str(authority.file)}
    with worker_at(address, authority.serve_as(address)) as worker:
        gateway = start_gateway(workers=[worker.url], env=trust)
        host = f"[{address}]" if ":" in address else address
        check_served(gateway, worker, f"{host}:{worker.port}")


@pytest.mark.parametrize("why", ["authority", "address"])
def test_tls_worker_that_is_not_to_be_trusted_gets_nothing(
    start_gateway: StartGateway, tmp_path: Path, why: str
) -> None:
    (tmp_path / "other").mkdir()
    authority = Authority(tmp_path)
    trusted = Authority(tmp_path / "other") if why == "authority" else authority
    named = "127.0.0.1" if why == "authority" else "127.0.0.2"
    with worker_at("127.0.0.1", authority.serve_as(named)) as worker:
        trust = {"SSL_CERT_FILE": str(trusted.file)}
        gateway = start_gateway(*PROBES, workers=[worker.url], env=trust, ready=503)
        until("the reason is told", lambda: "certificate" in reason(gateway))
        assert exchange(gateway.url, CHAT, chat()).status == 503
        assert worker.server.received == []
        gateway.stop()


def reason(gateway: GatewayProcess) -> str:
    """Why the worker takes no requests."""
    return str(exchange(gateway.url, "/ready").json()["workers"]["0"]).lower()


def test_no_proxy_is_asked_whatever_the_environment_says(
    start_gateway: StartGateway, fake_workers: list[FakeWorker]
) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    proxies = {form: dead for name in names for form in (name, name.lower())}
    env = {**proxies, "NO_PROXY": "", "no_proxy": ""}
    gateway = start_gateway(workers=[w.url for w in fake_workers], env=env)
    gateway.wait_up(2)
    counted = Counted(gateway)
    for stream in (False, True):
        assert exchange(gateway.url, CHAT, chat(stream=stream)).status == 200
    counted.is_(ok=2)
    check_nothing_left(gateway, fake_workers)
