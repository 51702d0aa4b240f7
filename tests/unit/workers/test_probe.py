from __future__ import annotations

import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from gateway.workers.probe import Limits, ProbeFailed, WorkerClient
from tests.unit.loopback import Peer, run, serving
from tests.unit.workers.worker_http import MODELS, SERVER_INFO, WorkerHttp

T = TypeVar("T")
Ask = Callable[[WorkerClient], Awaitable[T]]


def asked(ask: Ask[T], worker: WorkerHttp | None = None, **answers: tuple[int, Any]) -> T:
    """What `ask` gives at a worker with these answers; keys stand for paths."""

    async def main() -> T:
        http = worker or WorkerHttp()
        paths = {"models": "/v1/models", "info": SERVER_INFO}
        http.answers |= {paths.get(name, f"/{name}"): said for name, said in answers.items()}
        async with serving(http) as served:
            client = WorkerClient(served.url)
            try:
                return await ask(client)
            finally:
                await client.close()

    return run(main())


def test_health_is_200_and_nothing_else() -> None:
    asked(lambda client: client.health())
    for status in (503, 500, 404, 302, 204):
        with pytest.raises(ProbeFailed, match=f"/health answers {status}") as raised:
            asked(lambda client: client.health(), health=(status, ""))
        assert not raised.value.unreachable


def test_models_are_what_the_worker_lists() -> None:
    assert asked(lambda client: client.models()) == MODELS["data"]
    mixed = {"data": [{"id": "a"}, "b", None, {"id": "c"}]}
    assert asked(lambda client: client.models(), models=(200, mixed)) == [{"id": "a"}, {"id": "c"}]


@pytest.mark.parametrize("said", ["", "not JSON", [], {}, {"data": None}, {"data": {}}, "null"])
def test_models_of_another_shape_fail(said: Any) -> None:
    with pytest.raises(ProbeFailed, match="/v1/models"):
        asked(lambda client: client.models(), models=(200, said))


def test_metrics_are_text() -> None:
    assert asked(lambda client: client.metrics(), metrics=(200, "a 1\nb 2\n")) == "a 1\nb 2\n"
    with pytest.raises(ProbeFailed):
        asked(lambda client: client.metrics(), metrics=(404, ""))


def info(scheduler: object) -> tuple[int, Any]:
    return 200, {"vllm_config": {"scheduler_config": scheduler}}


def test_limits_are_the_scheduler_s() -> None:
    said = info({"max_num_seqs": 8, "max_num_batched_tokens": 2048})
    assert asked(lambda client: client.limits(), info=said) == Limits(8, 2048)
    assert asked(lambda client: client.limits(), info=info({})) == Limits(None, None)
    said = info({"max_num_seqs": "8", "max_num_batched_tokens": None})
    assert asked(lambda client: client.limits(), info=said) == Limits(None, None)


@pytest.mark.parametrize(
    "said", [(404, ""), (200, "text"), (200, {}), (200, {"vllm_config": "a string"}), info(None)]
)
def test_limits_that_are_not_told_fail(said: tuple[int, Any]) -> None:
    with pytest.raises(ProbeFailed):
        asked(lambda client: client.limits(), info=said)


def test_tokenize_asks_with_the_given_body() -> None:
    worker = WorkerHttp()
    body = {"model": "m", "prompt": "é"}
    said = (200, {"tokens": [1, 2], "count": 2})
    assert asked(lambda client: client.tokenize(body), worker, tokenize=said) == [1, 2]
    assert [(path, json.loads(data)) for path, data in worker.asked] == [("/tokenize", body)]
    for wrong in ({}, {"tokens": "x"}, []):
        with pytest.raises(ProbeFailed):
            asked(lambda client: client.tokenize(body), tokenize=(200, wrong))


def test_nobody_there_is_unreachable() -> None:
    async def main() -> None:
        client = WorkerClient(url)
        try:
            await client.health()
        finally:
            await client.close()

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ProbeFailed) as raised:
            run(main())
    assert raised.value.unreachable


@pytest.mark.parametrize(
    "said", [b"", b"noise\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"]
)
def test_a_broken_answer_is_a_failed_probe_of_a_reachable_worker(said: bytes) -> None:
    async def broken(peer: Peer) -> None:
        await peer.request()
        await peer.say(said)

    async def main() -> None:
        async with serving(broken) as served:
            client = WorkerClient(served.url)
            try:
                await client.health()
            finally:
                await client.close()

    with pytest.raises(ProbeFailed) as raised:
        run(main())
    assert not raised.value.unreachable


def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    asked(lambda client: client.health())
