"""What an OpenAI client may rely on, whatever serves it.

These cases need `gateway_url` and `model_name` only, so that they run on fake workers and on vLLM.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import httpx
import pytest

from tests.bodies import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    chat,
    completion,
    response,
    scripted,
)
from tests.contract.expect import assert_openai_error
from tests.gateway_process import total
from tests.raw_http import RawClient, exchange
from tests.waiting import until

SECONDS = 60  # an answer of a real engine on few cores


def test_chat_answers_with_our_headers(gateway_url: str, model_name: str) -> None:
    answer = exchange(gateway_url, CHAT, chat(model=model_name), seconds=SECONDS)
    assert answer.status == 200, answer.body
    assert answer.header("content-type") == "application/json"
    body = answer.json()
    assert body["object"] == "chat.completion"
    assert body["model"] == model_name
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["usage"]["completion_tokens"] <= 5
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    assert answer.header("x-gateway-worker") in ("0", "1")
    assert int(answer.header("x-gateway-predicted-cached-tokens") or "-1") >= 0
    assert answer.header("x-request-id")


def test_completion_answers(gateway_url: str, model_name: str) -> None:
    body = exchange(gateway_url, COMPLETIONS, completion(model=model_name), seconds=SECONDS).json()
    assert body["object"] == "text_completion"
    assert isinstance(body["choices"][0]["text"], str)
    assert body["usage"]["completion_tokens"] <= 5


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
def test_other_apis_answer(gateway_url: str, model_name: str, path: str, stream: bool) -> None:
    """Whole, byte for byte, and with the engine's own count, which is compared with ours."""

    def ok() -> float:
        return total(gateway_url, "gateway_requests_total", outcome="ok")

    def counted() -> float:
        return total(gateway_url, "gateway_prompt_tokens_total")

    make = chat if path == MESSAGES else response
    mismatches = "gateway_prompt_token_mismatches_total"
    ok_before, tokens_before, wrong = ok(), counted(), total(gateway_url, mismatches)
    body = make("Say hello. " * 20, model_name, stream=stream)
    answer = exchange(gateway_url, path, body, seconds=SECONDS)
    assert (answer.status, answer.end) == (200, "complete"), answer.body
    assert answer.header("x-gateway-worker") in ("0", "1")
    if stream:
        last = answer.events()[-1]
        ends = (b"event: message_stop\n", b"event: response.completed\n")
        assert last.startswith(ends) and last.endswith(b"}\n\n")
    else:
        assert answer.json()["model"] == model_name
    until("it is counted as whole", lambda: ok() == ok_before + 1)
    assert counted() > tokens_before + 40
    assert total(gateway_url, mismatches) == wrong


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("wanted", [False, True])
def test_c58_usage_chunk_only_for_who_asked(
    gateway_url: str, model_name: str, path: str, choices: int, wanted: bool
) -> None:
    make = chat if path == CHAT else completion
    body = make(model=model_name, stream=True, n=choices, temperature=0.5)
    if wanted:
        body["stream_options"] = {"include_usage": True}
    answer = exchange(gateway_url, path, body, seconds=SECONDS)
    assert answer.header("content-type") == "text/event-stream; charset=utf-8"
    assert answer.end == "complete"
    *events, done = answer.data()
    assert done == "[DONE]"
    assert [e for e in events if not e["choices"]] == (events[-1:] if wanted else [])
    if wanted:
        usage = events[-1]["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    finished = [c["index"] for e in events for c in e["choices"] if c["finish_reason"]]
    assert sorted(finished) == list(range(choices))


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_c58_options_that_do_not_ask(gateway_url: str, model_name: str, options: Any) -> None:
    body = chat(model=model_name, stream=True, stream_options=options)
    *events, done = exchange(gateway_url, CHAT, body, seconds=SECONDS).data()
    assert done == "[DONE]"
    assert all(e["choices"] for e in events)


def test_c22_event_stream_headers(gateway_url: str, model_name: str) -> None:
    headers = [("Accept-Encoding", "gzip, br")]
    body = chat(model=model_name, stream=True)
    answer = exchange(gateway_url, CHAT, body, headers=headers, seconds=SECONDS)
    assert answer.header("x-accel-buffering") == "no"
    assert answer.header("cache-control") == "no-cache"
    assert answer.header("content-encoding") is None
    assert answer.header("x-gateway-worker") in ("0", "1")


def test_c10_fields_only_vllm_knows(gateway_url: str, model_name: str) -> None:
    raw = json.dumps(
        chat(
            "Grüße 世界 🙂",
            model_name,
            chat_template_kwargs={"enable_thinking": False},
            cache_salt="s",
            priority=0,
            min_p=0.0,
            return_token_ids=True,
            zz_unknown={"b": [1.0, 12345678901234567890, None], "a": {"ü": "ü"}},
        ),
        ensure_ascii=False,
    ).encode()
    answer = exchange(gateway_url, CHAT, raw, seconds=SECONDS)
    assert answer.status == 200, answer.body


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


CONTENTS: list[Any] = [
    [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    [{"role": "system", "content": "be short"}, {"role": "user", "content": ""}],
    [{"role": "assistant", "content": None}, {"role": "user", "content": "hi"}],
    [{"role": "narrator", "content": "unknown role"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
    [{"role": "user", "content": [{"type": "input_audio", "input_audio": None}]}],
    [{"role": "user", "content": [{"type": {}}, {"type": []}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": nested(400)}]}],
    [{"role": "user", "content": [None, 1, "x"]}],
    [{"role": "user", "content": 7}],
    [{"role": "user"}],
    [{}],
    [None],
    ["hello"],
    [],
    "hello",
    {},
    None,
]


@pytest.mark.parametrize("messages", CONTENTS, ids=range(len(CONTENTS)))
@pytest.mark.parametrize("stream", [False, True])
def test_c29_c30_the_worker_judges_messages(
    gateway_url: str, model_name: str, messages: Any, stream: bool
) -> None:
    body = chat(model=model_name, messages=messages, stream=stream)
    answer = exchange(gateway_url, CHAT, body, seconds=SECONDS)
    assert answer.header("x-gateway-worker") in ("0", "1"), "the gateway refused it by itself"
    if answer.status != 200:
        assert 400 <= answer.status < 500
        assert_openai_error(answer, answer.status)


PROMPTS: list[Any] = [[1, 2, 3], [[1, 2], [3]], ["a", "b"], "", [], [[]], [""], [1.5], {}, None, 3]


@pytest.mark.parametrize("prompt", PROMPTS, ids=json.dumps)
def test_c30_any_shape_of_prompt(gateway_url: str, model_name: str, prompt: Any) -> None:
    answer = exchange(gateway_url, COMPLETIONS, completion(prompt, model_name), seconds=SECONDS)
    assert answer.header("x-gateway-worker") in ("0", "1"), "the gateway refused it by itself"
    assert answer.status != 502


def test_c29_fields_of_odd_types(gateway_url: str, model_name: str) -> None:
    for odd in (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tools": "x"},
        {"tools": [None]},
        {"max_completion_tokens": 4, "max_tokens": None},
        {"max_tokens": -1},
        {"max_tokens": 1e400},
        {"stream": "yes"},
        {"stream": None},
        {"stream_options": []},
        {"n": 0},
        {"cache_salt": 5},
        {"chat_template_kwargs": []},
    ):
        answer = exchange(gateway_url, CHAT, chat(model=model_name, **odd), seconds=SECONDS)
        assert answer.header("x-gateway-worker") in ("0", "1"), odd
        assert answer.status in (200, 400, 422), odd


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"model": "a", "messages": NaN}',
        b'\xff\xfe{"model": 1}',
        b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
    ],
    ids=["empty", "open", "list", "null", "string", "nan", "not-utf8", "deep", "surrogate"],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_c60_bad_json_is_judged_by_the_worker(gateway_url: str, path: str, raw: bytes) -> None:
    answer = exchange(gateway_url, path, raw, seconds=SECONDS)
    assert answer.header("x-gateway-worker") in ("0", "1"), "the gateway refused it by itself"
    assert answer.status != 502


def test_c60_unknown_model(gateway_url: str) -> None:
    error = assert_openai_error(exchange(gateway_url, CHAT, chat(model="no/such model")), 404)
    assert "no/such model" in error["message"]


def test_c60_messages_of_the_wrong_type(gateway_url: str, model_name: str) -> None:
    assert_openai_error(exchange(gateway_url, CHAT, chat(model=model_name, messages={})), 400)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_c60_wrong_method(gateway_url: str, path: str, method: str) -> None:
    answer = exchange(gateway_url, path, method=method)
    assert_openai_error(answer, 405)
    assert answer.header("allow") == "POST"


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/"), ("GET", "/v1"), ("GET", "/nowhere"), ("POST", "/v1/nowhere")]
)
def test_c60_unknown_path(gateway_url: str, method: str, path: str) -> None:
    assert_openai_error(exchange(gateway_url, path, method=method), 404)


def test_c05_stream_refused_has_the_workers_status(gateway_url: str, model_name: str) -> None:
    body = chat(model=model_name, stream=True, max_tokens=10_000_000)
    assert_openai_error(exchange(gateway_url, CHAT, body), 400)


def test_c68_no_redirect_for_a_trailing_slash(gateway_url: str, model_name: str) -> None:
    answer = exchange(gateway_url, CHAT + "/", chat(model=model_name), seconds=SECONDS)
    assert answer.status in (200, 404)


def test_c62_models(gateway_url: str, model_name: str) -> None:
    answer = exchange(gateway_url, "/v1/models")
    body = answer.json()
    assert body["object"] == "list"
    (card,) = [each for each in body["data"] if each["id"] == model_name]
    assert card["object"] == "model"
    assert card["max_model_len"] > 0
    assert {"created", "owned_by", "root", "permission"} <= card.keys()


def test_health_ready_docs_and_metrics(gateway_url: str) -> None:
    assert exchange(gateway_url, "/health").status == 200
    assert exchange(gateway_url, "/ready").status == 200
    docs = exchange(gateway_url, "/docs")
    assert docs.status == 200
    assert (docs.header("content-type") or "").startswith("text/html")
    metrics = exchange(gateway_url, "/metrics")
    assert (metrics.header("content-type") or "").startswith("text/plain")


@pytest.mark.parametrize("identity", ["abc", "A-b_c.9", "x" * 128])
def test_sane_request_id_is_kept(gateway_url: str, model_name: str, identity: str) -> None:
    headers = [("X-Request-Id", identity)]
    answer = exchange(gateway_url, CHAT, chat(model=model_name), headers=headers, seconds=SECONDS)
    assert answer.header("x-request-id") == identity


@pytest.mark.parametrize("identity", ["", "a b", "x" * 129, "a;b", "ü", "a\tb"])
def test_other_request_ids_are_replaced(gateway_url: str, model_name: str, identity: str) -> None:
    headers = [("X-Request-Id", identity)]
    answer = exchange(gateway_url, CHAT, chat(model=model_name), headers=headers, seconds=SECONDS)
    ours = answer.header("x-request-id")
    assert ours and ours != identity and ours.isascii()


def test_errors_have_a_request_id_too(gateway_url: str, model_name: str) -> None:
    headers = [("X-Request-Id", "mine")]
    answer = exchange(gateway_url, CHAT, chat(model="unknown"), headers=headers, seconds=SECONDS)
    assert answer.header("x-request-id") == "mine"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leave", ["close", "reset"])
def test_c01_c02_leaving_ends_the_request(
    gateway_url: str, model_name: str, stream: bool, leave: str
) -> None:
    gone = total(gateway_url, "gateway_requests_total", outcome="client_gone")
    body = chat("Count to a thousand.", model_name, max_tokens=2000, stream=stream)
    body["ignore_eos"] = True
    # Where a fake worker answers: a stream that lasts, a plain answer that does not come.
    headers = scripted(tokens=60, gap_seconds=1, head_delay_seconds=0 if stream else 60)
    with RawClient(gateway_url, SECONDS) as client:
        client.send("POST", CHAT, json.dumps(body).encode(), headers)
        if stream:
            client.read_events(client.read_head(), 1)
        else:
            until("in flight", lambda: total(gateway_url, "gateway_in_flight_requests") == 1)
        getattr(client, leave)()
    until("nothing in flight", lambda: not total(gateway_url, "gateway_in_flight_requests"), 1.5)
    assert total(gateway_url, "gateway_requests_total", outcome="client_gone") == gone + 1


def test_the_same_document_twice_is_cached_the_second_time(
    gateway_url: str, model_name: str
) -> None:
    document = f"{uuid.uuid4()} " + "The quick brown fox jumps over the lazy dog. " * 60
    before = total(gateway_url, "gateway_delivered_cached_tokens_total")
    first, second = (
        exchange(gateway_url, CHAT, chat(document + question, model_name), seconds=SECONDS)
        for question in ("Why?", "How?")
    )
    assert first.header("x-gateway-worker") == second.header("x-gateway-worker")
    assert int(second.header("x-gateway-predicted-cached-tokens") or 0) > 100
    usage = second.json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > usage["prompt_tokens"] // 2
    delivered = total(gateway_url, "gateway_delivered_cached_tokens_total") - before
    assert delivered >= cached


def test_concurrent_requests_all_answer(gateway_url: str, model_name: str) -> None:
    async def ask(client: httpx.AsyncClient, i: int) -> int:
        body = chat(f"{i} is a number. Is it?", model_name, stream=bool(i % 2))
        answer = await client.post(CHAT, json=body)
        assert not i % 2 or answer.text.endswith("data: [DONE]\n\n")
        return answer.status_code

    async def ask_all() -> list[int]:
        async with httpx.AsyncClient(base_url=gateway_url, timeout=SECONDS) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(16)))

    assert asyncio.run(ask_all()) == [200] * 16


def test_one_connection_carries_many_requests(gateway_url: str, model_name: str) -> None:
    raw = json.dumps(chat(model=model_name)).encode()
    streamed = json.dumps(chat(model=model_name, stream=True)).encode()
    with RawClient(gateway_url, SECONDS) as client:
        for body in (raw, streamed, raw, b"{", raw):
            client.send("POST", CHAT, body)
            assert client.read().status == (400 if body == b"{" else 200)
