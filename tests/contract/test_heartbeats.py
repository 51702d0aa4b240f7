"""Heartbeats: comments in a stream that is silent, and nowhere else.

What lasts is measured by a stream of the gateway's own, silent between two events: when it has had
so many heartbeats, any other could have had as many.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from typing import Any

import openai
import pytest

from tests.bodies import CHAT, COMPLETIONS, FAKE_MODEL, chat, completion, scripted
from tests.conftest import StartGateway
from tests.contract.conftest import check_nothing_left
from tests.contract.expect import Counted, assert_in_band_error, only, wait_only
from tests.contract.test_failover import SLOW_PROBES, black_hole, documents_on
from tests.contract.test_wire import less_usage
from tests.fake_worker import FakeWorker
from tests.gateway_process import GatewayProcess, free_port
from tests.raw_http import Answer, RawClient, exchange
from tests.waiting import until

BEATING = ["--heartbeat-seconds", "0.2"]
GATEWAY_ARGS = BEATING
PING = b": ping\n\n"
LEFT_SECONDS = 1.0  # within which a worker must know that its client has left


def streaming(**script: Any) -> tuple[bytes, list[tuple[str, str]]]:
    """Body and headers of a request for a stream."""
    return json.dumps(chat(stream=True)).encode(), scripted(**script)


def pings(answer: Answer) -> int:
    return answer.body.count(PING)


def read_pings(client: RawClient, answer: Answer, count: int) -> None:
    """Read on until so many more heartbeats are here."""
    wanted = pings(answer) + count
    for _ in client.read_pieces(answer):
        if pings(answer) >= wanted:
            return
    raise AssertionError(f"the answer ended with {pings(answer)} of {wanted} heartbeats")


def read_on(client: RawClient, answer: Answer) -> None:
    for _ in client.read_pieces(answer):
        pass


def open_gate(workers: list[FakeWorker], name: str) -> None:
    for worker in workers:
        worker.open_gate(name)


def let_beats_pass(gateway: GatewayProcess, count: int = 3) -> None:
    """Return when a silent stream has had so many heartbeats."""
    with RawClient(gateway.url) as client:
        client.send("POST", CHAT, *streaming(gates={"1": "never"}))
        answer = client.read_head()
        read_pings(client, answer, count)


# --- where they are


@pytest.mark.parametrize("gate", ["head", "body"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_c24_before_the_first_token(
    gateway: GatewayProcess,
    fake_workers: list[FakeWorker],
    counted: Counted,
    path: str,
    gate: str,
) -> None:
    body = (chat if path == CHAT else completion)(stream=True)
    with RawClient(gateway.url) as client:
        client.send("POST", path, json.dumps(body).encode(), scripted(gates={gate: "on"}))
        answer = client.read_head()
        assert answer.status == 200
        assert answer.header("content-type") == "text/event-stream; charset=utf-8"
        assert answer.header("cache-control") == "no-cache"
        assert answer.header("x-accel-buffering") == "no"
        assert answer.header("x-gateway-worker") in ("0", "1")
        assert answer.header("x-request-id")
        read_pings(client, answer, 2)
        assert answer.body == PING * 2
        open_gate(fake_workers, "on")
        read_on(client, answer)
    assert answer.end == "complete"
    assert answer.body.replace(PING, b"") == less_usage(bytes(only(fake_workers).answer))
    counted.is_(ok=1)


@pytest.mark.parametrize("asked", [False, True])
def test_c24_between_events(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted, asked: bool
) -> None:
    body = json.dumps(chat(stream=True, stream_options={"include_usage": asked})).encode()
    gates = {"1": "one", "3": "three", "6": "usage", "7": "done"}
    with RawClient(gateway.url) as client:
        client.send("POST", CHAT, body, scripted(gates=gates))
        answer = client.read_head()
        for name in gates.values():
            read_pings(client, answer, 2)
            open_gate(fake_workers, name)
        read_on(client, answer)
    said = bytes(only(fake_workers).answer)
    assert answer.body.replace(PING, b"") == (said if asked else less_usage(said))
    assert answer.end == "complete"
    counted.is_(ok=1)


CONTENT = 'data: {"choices":[{"index":0,"delta":{"content":"a\\n\\nb"}}]}\n\n'
USAGE = 'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":1}}\n\n'
DONE = "data: [DONE]\n\n"


@pytest.mark.parametrize("split", ["content", "usage"])
@pytest.mark.parametrize("asked", [False, True])
def test_c24_never_inside_an_event(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], asked: bool, split: str
) -> None:
    """A stream for each place in an event at which the worker may fall silent."""
    body = json.dumps(chat(stream=True, stream_options={"include_usage": asked})).encode()
    event = CONTENT if split == "content" else USAGE
    passed = [CONTENT, CONTENT, DONE] if split == "content" else [CONTENT, DONE]
    if asked and split == "usage":
        passed.insert(1, USAGE)
    with ExitStack() as stack:
        talks: list[tuple[RawClient, Answer]] = []
        for at in range(1, len(event)):
            client = stack.enter_context(RawClient(gateway.url))
            events = [CONTENT, event[:at], event[at:], DONE]
            script = scripted(events=events, gates={"2": "inside", "3": "behind"})
            client.send("POST", CHAT, body, script)
            talks.append((client, client.read_head()))
        for client, answer in talks:
            client.read_events(answer, 1)
        let_beats_pass(gateway)
        open_gate(fake_workers, "inside")
        for client, answer in talks:
            while answer.body.replace(PING, b"").count(b"\n\n") < len(passed) - 1:
                next(client.read_pieces(answer))
            read_pings(client, answer, 1)
        open_gate(fake_workers, "behind")
        for client, answer in talks:
            read_on(client, answer)
    for at, (_, answer) in enumerate(talks, 1):
        events = [each for each in answer.events() if each != PING]
        assert events == [each.encode() for each in passed], f"split at {at}: {answer.body!r}"
        assert answer.end == "complete"


def test_c24_none_when_off(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], start_gateway: StartGateway
) -> None:
    off = start_gateway(workers=[worker.url for worker in fake_workers])
    off.wait_up(len(fake_workers))
    with RawClient(off.url) as client:
        client.send("POST", CHAT, *streaming(gates={"body": "on"}))
        answer = client.read_head()
        let_beats_pass(gateway)
        open_gate(fake_workers, "on")
        read_on(client, answer)
    assert answer.body.count(b"\n\n") == len(answer.data()) == 7
    check_nothing_left(off, fake_workers)


def test_c24_none_in_a_stream_that_is_not_silent(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    answer = exchange(gateway.url, CHAT, chat(stream=True), headers=scripted(tokens=60))
    assert pings(answer) <= 1  # where this machine stood still for that long
    assert answer.data()[-1] == "[DONE]"


@pytest.mark.parametrize("gate", ["head", "body"])
def test_c24_none_in_a_plain_answer(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], gate: str
) -> None:
    with RawClient(gateway.url) as client:
        raw = json.dumps(chat()).encode()
        client.send("POST", CHAT, raw, scripted(gates={gate: "on"}))
        _, request = wait_only(fake_workers)
        let_beats_pass(gateway)
        open_gate(fake_workers, "on")
        answer = client.read()
    assert answer.body == bytes(request.answer)
    assert answer.header("content-length") == str(len(answer.body))


# --- what can only be told inside the stream once one is out


NOT_SO_LONG = {"message": "m", "type": "BadRequestError", "param": "max_tokens", "code": 400}
REFUSALS: list[dict[str, Any]] = [
    {"status": 400, "body": {"error": NOT_SO_LONG}},
    {"status": 503, "headers": [["retry-after", "1"]]},
    {"status": 500, "split_bytes": 1, "framing": "chunked"},
    {"status": 429, "body": {"error": {"message": "Grüße 🙂", "type": "t", "code": 429}}},
]


@pytest.mark.parametrize("script", REFUSALS, ids=lambda s: str(s["status"]))
def test_c24_a_late_refusal_is_told_in_band(
    gateway: GatewayProcess,
    fake_workers: list[FakeWorker],
    counted: Counted,
    script: dict[str, Any],
) -> None:
    for worker in fake_workers:
        worker.say(gates={"head": "on"}, **script)
    answer = late(gateway, fake_workers)
    assert answer.end == "cut"
    assert answer.events()[0] == PING
    last = json.loads(answer.events()[-1].removeprefix(b"data: "))
    assert last == json.loads(only(fake_workers).answer)
    assert last["error"]["message"]
    outcomes = {400: "ok", 429: "refused", 500: "upstream_error", 503: "refused"}
    counted.is_(**{outcomes[script["status"]]: 1})


@pytest.mark.parametrize(
    "body",
    [
        "",
        "Service Unavailable\n\nplease\r\nwait",
        '{\n "error": {\n\n  "message": "in lines"\n }\n}\n',
        '{\r\n "error":\r\n\r\n {"message": "in lines"}}',
        '{"detail": "not in OpenAI\'s shape"}',
        '{"error": {"message": "' + "x" * 200_000 + '"}}',
    ],
    ids=["empty", "text", "lines", "crlf", "detail", "long"],
)
def test_c24_a_late_refusal_of_any_shape_is_one_event_that_says_error(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], body: str
) -> None:
    """SDKs parse each event, and raise at its `error`."""
    for worker in fake_workers:
        worker.say(gates={"head": "on"}, status=503, body=body)
    answer = late(gateway, fake_workers)
    assert answer.end == "cut"
    *before, last = answer.events()
    assert set(before) == {PING}
    assert json.loads(last.removeprefix(b"data: "))["error"]["message"]


def late(gateway: GatewayProcess, workers: list[FakeWorker]) -> Answer:
    """A stream whose worker answers once a heartbeat is out."""
    with RawClient(gateway.url) as client:
        client.send("POST", CHAT, json.dumps(chat(stream=True)).encode())
        answer = client.read_head()
        assert answer.status == 200
        read_pings(client, answer, 1)
        open_gate(workers, "on")
        read_on(client, answer)
    return answer


@pytest.mark.parametrize("cut", ["rst", "fin"])
def test_c24_worker_that_dies_late_is_told_in_band(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted, cut: str
) -> None:
    until("no idle connection", lambda: not idle_connections(gateway), 8)
    for worker in fake_workers:
        worker.say(gates={"head": "on"}, cut=cut)
    answer = late(gateway, fake_workers)
    assert answer.events()[0] == PING
    assert_in_band_error(answer)
    only(fake_workers)
    counted.is_(upstream_error=1)


def idle_connections(gateway: GatewayProcess) -> float:
    return gateway.total("gateway_upstream_connections", state="idle")


@pytest.mark.parametrize("cut", ["rst", "fin", "clean"])
def test_c24_worker_that_dies_between_heartbeats_is_told_in_band(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], counted: Counted, cut: str
) -> None:
    script = scripted(gates={"1": "on"}, cut=cut, cut_after=2, cut_inside=9)
    with RawClient(gateway.url) as client:
        client.send("POST", CHAT, json.dumps(chat(stream=True)).encode(), script)
        answer = client.read_head()
        read_pings(client, answer, 2)
        open_gate(fake_workers, "on")
        read_on(client, answer)
    assert_in_band_error(answer)
    counted.is_(upstream_truncated=1)


@pytest.mark.parametrize("limit", ["head", "idle"])
def test_c24_they_keep_no_worker_from_its_limits(
    start_gateway: StartGateway, fake_workers: list[FakeWorker], limit: str
) -> None:
    gateway = start_gateway(
        *BEATING, f"--{limit}-seconds", "1", workers=[worker.url for worker in fake_workers]
    )
    gateway.wait_up(len(fake_workers))
    counted = Counted(gateway)
    started = time.monotonic()
    script = {"hold": True} if limit == "head" else {"gates": {"2": "never"}}
    answer = exchange(gateway.url, CHAT, chat(stream=True), headers=scripted(**script))
    assert 0.9 < time.monotonic() - started < 3
    assert pings(answer) >= 2
    assert "1 s" in assert_in_band_error(answer)["message"]
    counted.is_(timeout=1)
    check_nothing_left(gateway, fake_workers)


# --- the client


@pytest.mark.parametrize("leave", ["close", "reset"])
@pytest.mark.parametrize("gate", ["head", "body", "2"])
def test_c24_c02_client_that_leaves_between_two_frees_the_worker(
    gateway: GatewayProcess,
    fake_workers: list[FakeWorker],
    counted: Counted,
    gate: str,
    leave: str,
) -> None:
    with RawClient(gateway.url) as client:
        client.send("POST", CHAT, *streaming(gates={gate: "never"}))
        read_pings(client, client.read_head(), 2)
        worker, request = wait_only(fake_workers)
        left_at = time.monotonic()
        getattr(client, leave)()
    assert worker.wait_peer_closed(request) - left_at < LEFT_SECONDS
    worker.wait("running is 0", lambda: worker.engine.running == 0)
    counted.is_(client_gone=1)


def test_c24_the_sdk_does_not_see_them(
    gateway: GatewayProcess, fake_workers: list[FakeWorker]
) -> None:
    script = scripted(head_delay_seconds=0.5, gap_seconds=0.3, tokens=3)
    assert pings(exchange(gateway.url, CHAT, chat(stream=True), headers=script)) >= 3
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model=FAKE_MODEL,
            messages=[{"role": "user", "content": "Say hello."}],
            stream=True,
            extra_headers=dict(script),
        )
        texts = [chunk.choices[0].delta.content for chunk in stream]
    assert texts == ["", " tok", " tok", " tok"]


@pytest.mark.parametrize("how", [{"status": 400}, {"status": 503}, {"cut": "fin"}], ids=json.dumps)
def test_c24_the_sdk_raises_what_comes_late(
    gateway: GatewayProcess, fake_workers: list[FakeWorker], how: dict[str, Any]
) -> None:
    script = scripted(head_delay_seconds=0.5, **how)
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.APIError) as raised:
            list(
                client.chat.completions.create(
                    model=FAKE_MODEL,
                    messages=[{"role": "user", "content": "Say hello."}],
                    stream=True,
                    extra_headers=dict(script),
                )
            )
    said = f"scripted {how['status']}" if "status" in how else "worker"
    assert said in raised.value.message


# --- another worker


def test_c24_c45_refused_goes_to_the_next_worker(
    start_gateway: StartGateway, fake_workers: list[FakeWorker]
) -> None:
    gateway = start_gateway(*BEATING, *SLOW_PROBES, workers=[w.url for w in fake_workers])
    gateway.wait_up(2)
    (document,) = documents_on(gateway, "1", 1)
    counted = Counted(gateway)
    fake_workers[1].refuse()
    answer = exchange(gateway.url, CHAT, chat(document, stream=True))
    assert (answer.status, answer.end) == (200, "complete")
    assert answer.header("x-gateway-worker") == "0"
    assert answer.events()[-1] == b"data: [DONE]\n\n"
    counted.is_(ok=1)
    check_nothing_left(gateway, fake_workers)


CONNECTING = [*BEATING, *SLOW_PROBES, "--connect-seconds", "0.7"]


def test_c24_c45_next_worker_after_heartbeats(
    start_gateway: StartGateway, fake_workers: list[FakeWorker]
) -> None:
    """The head is out, with the first worker's name, when the second one is tried."""
    gateway = start_gateway(*CONNECTING, workers=[w.url for w in fake_workers])
    gateway.wait_up(2)
    (document,) = documents_on(gateway, "1", 1)
    counted = Counted(gateway)
    fake_workers[0].reset()
    fake_workers[1].refuse()
    with black_hole(fake_workers[1].port):
        answer = exchange(gateway.url, CHAT, chat(document, stream=True))
    assert (answer.status, answer.end) == (200, "complete")
    assert answer.events()[0] == PING
    said = bytes(only(fake_workers[:1]).answer)
    assert answer.body.replace(PING, b"") == less_usage(said)
    counted.is_(ok=1)
    check_nothing_left(gateway, fake_workers)


def test_c24_c16_no_worker_left_after_heartbeats(start_gateway: StartGateway) -> None:
    with FakeWorker(port=free_port()) as worker:
        gateway = start_gateway(*CONNECTING, workers=[worker.url])
        until("no connection in use", lambda: not idle_connections(gateway))
        worker.refuse()
        with black_hole(worker.port):
            answer = exchange(gateway.url, CHAT, chat(stream=True))
        assert answer.events()[0] == PING
        assert assert_in_band_error(answer)["code"] == "no_worker_ready"
        gateway.stop()
