"""The fake worker itself, before anything is concluded from it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import httpx
import pytest

from tests.bodies import CHAT, chat, scripted
from tests.fake_worker import FakeWorker
from tests.raw_http import RawClient, exchange


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    with FakeWorker() as worker:
        yield worker


def test_plain_answer_carries_usage_of_a_cache_that_caches(worker: FakeWorker) -> None:
    body = chat("x" * 1000, max_tokens=3)
    first, second = (exchange(worker.url, CHAT, body).json()["usage"] for _ in range(2))
    assert first["completion_tokens"] == 3
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    expected = (first["prompt_tokens"] - 1) // 16 * 16
    assert second["prompt_tokens_details"] == {"cached_tokens": expected}
    other = exchange(worker.url, CHAT, chat("y" + "x" * 999)).json()["usage"]
    assert other["prompt_tokens_details"] == {"cached_tokens": 0}


def test_cache_evicts_the_tail_of_a_chain_first(worker: FakeWorker) -> None:
    cache = worker.engine.cache
    cache.capacity_blocks = 4
    long = [b"a%d" % i for i in range(65)]
    assert cache.look_up_and_store(long, "") == 0
    cache.look_up_and_store([b"b"] * 16, "")
    assert cache.look_up_and_store(long[:49], "") == 48


def test_stream_is_vllms(worker: FakeWorker) -> None:
    answer = exchange(worker.url, CHAT, chat(stream=True, max_tokens=3))
    assert answer.header("content-type") == "text/event-stream; charset=utf-8"
    *events, done = answer.data()
    assert done == "[DONE]"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None, None, None, "stop"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 3
    assert "usage" in events[1], "forced usage is continuous in vLLM"


def test_usage_is_absent_where_it_is_neither_forced_nor_wanted(worker: FakeWorker) -> None:
    worker.set(force_include_usage=False)
    events = exchange(worker.url, CHAT, chat(stream=True)).data()
    assert not any("usage" in each for each in events[:-1])
    wanted = chat(stream=True, stream_options={"include_usage": True})
    events = exchange(worker.url, CHAT, wanted).data()
    assert ["usage" in each for each in events[-3:-1]] == [False, True]


@pytest.mark.parametrize("how", [{"split_bytes": 1}, {"rechunk_bytes": 7}, {"rechunk_at": (5, 6)}])
def test_split_bytes_are_the_same_bytes(worker: FakeWorker, how: dict[str, object]) -> None:
    plain = exchange(worker.url, CHAT, chat(stream=True))
    split = exchange(worker.url, CHAT, chat(stream=True), headers=scripted(**how))
    identities = [each["id"] for each in (plain.data()[0], split.data()[0])]
    assert split.body.replace(*(i.encode() for i in reversed(identities))) == plain.body
    assert len(split.pieces) != len(plain.pieces) or "split_bytes" in how


@pytest.mark.parametrize("cut", ["rst", "fin"])
def test_cut_mid_stream(worker: FakeWorker, cut: str) -> None:
    headers = scripted(cut=cut, cut_after=3)
    answer = exchange(worker.url, CHAT, chat(stream=True), headers=headers)
    assert answer.end == "cut"
    assert len(answer.events()) == 3


def test_clean_end_without_done(worker: FakeWorker) -> None:
    headers = scripted(cut="clean", cut_after=3)
    answer = exchange(worker.url, CHAT, chat(stream=True), headers=headers)
    assert (answer.end, len(answer.events())) == ("complete", 3)


@pytest.mark.parametrize("framing", ["chunked", "length", "eof"])
def test_framings(worker: FakeWorker, framing: str) -> None:
    answer = exchange(worker.url, CHAT, chat(), headers=scripted(framing=framing))
    assert answer.json()["object"] == "chat.completion"
    assert (answer.header("content-length") is not None) == (framing == "length")


def test_gzip_informational_trailers_and_extra_headers(worker: FakeWorker) -> None:
    script = scripted(
        content_encoding="gzip",
        informational=[103],
        trailers=[["x-late", "1"]],
        headers=[["x-more", "2"]],
    )
    answer = exchange(worker.url, CHAT, chat(), headers=script)
    assert json.loads(gzip.decompress(answer.body))["object"] == "chat.completion"
    assert answer.header("x-more") == "2"


def test_scripted_status_and_own_judgement(worker: FakeWorker) -> None:
    script = scripted(status=503, headers=[["retry-after", "1"]])
    answer = exchange(worker.url, CHAT, chat(), headers=script)
    assert (answer.status, answer.header("retry-after")) == (503, "1")
    assert exchange(worker.url, CHAT, b"{").status == 400
    assert exchange(worker.url, CHAT, chat(max_tokens=10**9)).status == 400
    unknown = exchange(worker.url, CHAT, {**chat(), "model": "other"})
    assert (unknown.status, unknown.json()["error"]["param"]) == (404, "model")


def test_received_bytes_and_the_peers_end_are_recorded(worker: FakeWorker) -> None:
    raw = b'{ "model": "fake-model", "messages": [] , "x": 1.0}'
    with RawClient(worker.url) as client:
        client.send("POST", CHAT, raw, [("X-Odd-CASE", "1"), *scripted(hold=True)])
        (received,) = worker.wait_inference()
        assert worker.engine.running == 1
    worker.wait_peer_closed(received)
    worker.wait("running is 0", lambda: worker.engine.running == 0)
    assert received.body == raw
    assert (b"X-Odd-CASE", b"1") in received.headers
    assert worker.engine.aborted == 1


def test_gate_holds_until_it_is_opened(worker: FakeWorker) -> None:
    with RawClient(worker.url) as client:
        client.send(
            "POST", CHAT, json.dumps(chat(stream=True)).encode(), scripted(gates={"2": "g"})
        )
        answer = client.read_head()
        client.read_events(answer, 2)
        assert len(answer.events()) == 2
        worker.open_gate("g")
        for _ in client.read_pieces(answer):
            pass
    assert answer.data()[-1] == "[DONE]"


def test_refuse_and_listen_again_on_the_same_port(worker: FakeWorker) -> None:
    assert exchange(worker.url, "/health").status == 200
    worker.refuse()
    with pytest.raises(ConnectionRefusedError):
        exchange(worker.url, "/health")
    worker.listen()
    assert exchange(worker.url, "/health").status == 200


def test_big_answer_waits_for_a_slow_reader(worker: FakeWorker) -> None:
    size = 20_000_000
    with RawClient(worker.url, receive_buffer_bytes=4096) as client:
        client.send("POST", CHAT, json.dumps(chat()).encode(), scripted(size_bytes=size))
        answer = client.read_head()
        connection = worker.server.connections[-1]
        assert connection.transport.get_write_buffer_size() < 1_000_000
        assert sum(map(len, client.read_pieces(answer))) == size
    assert answer.end == "complete"


def test_chunked_request_pipelining_and_expect(worker: FakeWorker) -> None:
    with RawClient(worker.url) as client:
        client.send_bytes(
            b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            b'c\r\n{"prompt":"a\r\n2\r\n"}\r\n0\r\n\r\n'
        )
        assert client.read().status == 200
        assert client.read().json()["object"] == "text_completion"
    assert worker.inference[0].body == b'{"prompt":"a"}'


@pytest.mark.parametrize("names", ["new", "old", "none"])
def test_metrics_names(worker: FakeWorker, names: str) -> None:
    worker.set(metric_names=names, engine_labels=("0", "1"))
    text = httpx.get(f"{worker.url}/metrics").text
    assert ("vllm:kv_cache_usage_perc" in text) == (names == "new")
    assert ("vllm:gpu_cache_usage_perc" in text) == (names == "old")
    assert ("vllm:num_requests_running" in text) == (names != "none")


def test_control_endpoints(worker: FakeWorker) -> None:
    card = exchange(worker.url, "/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("fake-model", 32768)
    assert exchange(worker.url, "/tokenize", b"{}").status == 404
    worker.set(tokenize=lambda body: {"tokens": [1], "count": 1})
    assert exchange(worker.url, "/tokenize", b"{}").json()["count"] == 1
    worker.set(health=None)
    with pytest.raises(TimeoutError):
        exchange(worker.url, "/health", seconds=0.2)
