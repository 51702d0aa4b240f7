"""Prompts of every kind have the engine's own token ids, and its cache finds what was predicted.

SmolLM2's template shows neither tools nor documents, so one worker of its own has a template that
shows everything, in a tokenizer that adds special tokens.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gateway.prompt.tokenizer import load_tokenizer
from gateway.prompt.verify import PROBES, TEXTS, Probe, Verdict, tokenize_body, verify
from gateway.workers.probe import WorkerClient
from tests.bodies import CHAT, COMPLETIONS, MESSAGES, RESPONSES, chat, completion, response
from tests.engine.served import ADAPTER, ALIAS, TEMPLATE, vllm_arguments
from tests.engine.test_affinity import worker_url
from tests.probes import without_feature
from tests.up_process import MODEL_NAME, UpProcess, running
from tests.waiting import until

pytestmark = pytest.mark.timeout(420)

FALLBACK = "gateway_affinity_fallback_total"
MISMATCHES = "gateway_prompt_token_mismatches_total"
USER = {"role": "user", "content": "What is the capital of France? " * 8}
SYSTEM = {"role": "system", "content": "Answer in one short sentence. " * 8}
TOOL = {
    "type": "function",
    "function": {
        "parameters": {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}},
        "name": "look_up",
        "description": "Looks it up.",
    },
}
FLAT = {"type": "function", **TOOL["function"], "strict": True}  # type: ignore[dict-item]
CALL = {
    "index": 0,
    "type": "function",
    "function": {"name": "look_up", "arguments": '{"b": "ü", "a": [1.0, null]}'},
    "id": "call_1",
}
CALLED = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Paris"}]},
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    folder = tmp_path_factory.mktemp("exact")
    often = ["--cpu-workers", "1", "--token-check-seconds", "0.2"]
    with running(UpProcess(folder, often, vllm_arguments(folder)), 1) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def worker(served: UpProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=worker_url(served, "0"), timeout=60, trust_env=False) as client:
        yield client


def ids(worker: httpx.Client, fields: dict[str, Any]) -> list[int]:
    answer = worker.post("/tokenize", json=tokenize_body(MODEL_NAME, fields))
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["tokens"]
    return found


# --- at start


def test_every_probe_is_read_as_the_engine_reads_it(served: UpProcess) -> None:
    folder = served.log_file.parent / "tokenizer"

    async def asked() -> Verdict:
        client = WorkerClient(worker_url(served, "0"))
        try:
            return await verify(MODEL_NAME, load_tokenizer(folder, TEMPLATE), client.tokenize)
        finally:
            await client.close()

    verdict = asyncio.run(asked())
    assert verdict.content == "openai"
    # vLLM 0.28 keeps the billing line; such prompts are read as bytes there.
    assert verdict.failed.keys() <= {"billing"}, verdict
    assert served.log().count("are read as bytes") == len(verdict.failed)
    for name in (MODEL_NAME, ALIAS, ADAPTER):
        assert f"model {name}: prompts are read as exact tokens" in served.log()


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_the_engine_sees_what_a_probe_is_there_for(worker: httpx.Client, probe: Probe) -> None:
    assert ids(worker, probe.fields) != ids(worker, without_feature(probe))


def test_the_engine_adds_special_tokens_to_texts(worker: httpx.Client) -> None:
    for text in TEXTS.values():
        with_them, without = (
            worker.post("/tokenize", json={"prompt": text, "add_special_tokens": add}).json()
            for add in (True, False)
        )
        assert with_them["count"] == without["count"] + 1


# --- at run time


def of_chat(*messages: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, chat(model=MODEL_NAME, messages=list(messages), max_tokens=1, **more)


def of_messages(*messages: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return MESSAGES, chat(model=MODEL_NAME, messages=list(messages), max_tokens=1, **more)


def of_text(prompt: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, completion(prompt, MODEL_NAME, **{"max_tokens": 1, **more})


def of_response(given: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return RESPONSES, response(given, MODEL_NAME, max_output_tokens=16, **more)


def parts(*texts: str, kind: str = "text") -> list[dict[str, Any]]:
    return [{"text": text * 8, "type": kind} for text in texts]


USE = {"type": "tool_use", "id": "t", "name": "look_up", "input": {"b": "ü"}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": parts("Paris", "France")}
ANTHROPIC_TOOL = {"name": "look_up", "input_schema": {"properties": {"b": {"type": "string"}}}}
BODIES = [
    of_chat(USER),
    of_chat(SYSTEM, USER, {"role": "assistant", "content": " Paris. "}, USER),
    of_chat(USER, n=2, temperature=0.5),
    of_chat(USER, add_generation_prompt=False),
    of_chat({"role": "user", "content": parts(" one ", "two")}),
    of_chat({"role": "user", "content": ["plain", *parts("more and more ")], "name": "bob"}),
    of_chat({"role": "system", "content": parts("Be brief.", "x-anthropic")}, USER),
    of_chat(USER, tools=[TOOL]),
    of_chat(USER, tools=[TOOL], tool_choice="none"),
    of_chat(USER, tools=[{**TOOL, "defer_loading": True}], parallel_tool_calls=False),
    of_chat(*CALLED),
    of_chat(*CALLED, tools=[TOOL, {"type": "function", "function": {"name": "f"}}]),
    of_chat(USER, {"role": "assistant", "content": "a", "reasoning_content": "b" * 99}, USER),
    of_chat(USER, {"role": "assistant"}, USER),
    of_chat(
        USER, {"role": "assistant", "content": "It is "},
        add_generation_prompt=False, continue_final_message=True,
    ),
    of_chat(USER, documents=[{"title": "France", "text": "Its capital is Paris. " * 8}]),
    of_chat(USER, chat_template_kwargs={"custom": "x", "unset": None, "enable_thinking": "auto"}),
    of_chat(USER, reasoning_effort="none"),
    of_chat(USER, reasoning_effort="high", chat_template_kwargs={"enable_thinking": False}),
    of_chat(USER, add_special_tokens=True),
    of_chat({"role": "developer", "content": "Be brief. " * 8}, SYSTEM, USER),
    of_chat(USER, functions=[{"name": "ignored"}], response_format={"type": "text"}),
    of_text("Once upon a time " * 20),
    of_text("Once upon a time " * 20, add_special_tokens=False, echo=True, n=2),
    of_text(["Once upon a time " * 20, "The end."]),
    of_text(list(range(100, 200))),
    of_text([list(range(100, 200)), [7, 8]]),
    of_response("Once upon a time " * 20),
    of_response([USER], instructions="Be brief. " * 8),
    of_response([{"role": "user", "content": parts("a", "b", kind="input_text")}], tools=[FLAT]),
    of_response([
        USER,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": parts("So", kind="output_text")},
        {"type": "function_call", "call_id": "c", "name": "look_up", "arguments": '{"b": "ü"}'},
        {"type": "function_call_output", "call_id": "c", "output": "Paris"},
    ]),
    of_response("Once upon a time " * 20, reasoning={"effort": "low"}),
    of_messages(USER, system=parts("Be brief.", "Be kind.")),
    of_messages({"role": "user", "content": parts(" one ", "two")}, tools=[ANTHROPIC_TOOL]),
    of_messages(
        USER,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "So"}, USE]},
        {"role": "user", "content": [RESULT, *parts("And?")]},
        tools=[ANTHROPIC_TOOL],
    ),
    of_messages(USER, tools=[ANTHROPIC_TOOL], tool_choice={"type": "none"}),
    of_messages(USER, output_config={"effort": "high"}),
]  # fmt: skip


def cached_tokens(usage: dict[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return int(
        (details or {"cached_tokens": usage.get("cache_read_input_tokens")})["cached_tokens"]
    )


@pytest.mark.parametrize(
    ("path", "body"), BODIES, ids=[f"{n}-{path[4:]}" for n, (path, _) in enumerate(BODIES)]
)
def test_the_engine_counts_and_caches_what_was_read(
    served: UpProcess, path: str, body: dict[str, Any]
) -> None:
    """Under a salt of their own: what is cached then was put there by the same body."""
    body = {**body, "cache_salt": uuid.uuid4().hex}
    bytes_before, wrong_before = served.total(FALLBACK), served.total(MISMATCHES)
    with httpx.Client(base_url=served.url, timeout=120, trust_env=False) as client:
        answers = [client.post(path, json=body) for _ in range(2)]
    for answer in answers:
        assert answer.status_code == 200, answer.text
    predicted = [int(answer.headers["x-gateway-predicted-cached-tokens"]) for answer in answers]
    assert predicted[0] == 0 < predicted[1]
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or isinstance(prompt[0], int):
        # Of several answers to one prompt the later find what the first has left.
        assert cached_tokens(answers[1].json()["usage"]) == predicted[1]
    # Counted when the requests before had ended, which their successors show.
    assert served.total(FALLBACK) == bytes_before
    assert served.total(MISMATCHES) == wrong_before, served.log()[-2000:]


def test_what_is_not_read_exactly_is_answered_all_the_same(served: UpProcess) -> None:
    before, wrong = served.total(FALLBACK), served.total(MISMATCHES)
    bodies = [
        of_text("Once upon a time", truncate_prompt_tokens=2),
        of_messages(USER, thinking={"type": "disabled"}),
        of_messages(USER, {"role": "system", "content": "Be brief."}, USER),
    ]
    with httpx.Client(base_url=served.url, timeout=120, trust_env=False) as client:
        for path, body in bodies:
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
    until(
        "all are counted",
        lambda: served.total(FALLBACK) == before + len(bodies),
    )
    assert served.total(MISMATCHES) == wrong


def test_c53_names_salts_and_adapters(served: UpProcess) -> None:
    """The base model's names are one; an adapter and each salt have a cache of their own."""
    text = f"{uuid.uuid4()} " + "The quick brown fox. " * 20
    told = []
    with httpx.Client(base_url=served.url, timeout=120, trust_env=False) as client:
        for model, salt in (
            (MODEL_NAME, None), (ALIAS, None), (ADAPTER, None), (ADAPTER, None),
            (MODEL_NAME, "x"), (MODEL_NAME, "y"), (ALIAS, "x"), (ADAPTER, "x"), (ADAPTER, "x"),
        ):  # fmt: skip
            body = chat(text, model, max_tokens=1) | ({"cache_salt": salt} if salt else {})
            answer = client.post(CHAT, json=body)
            assert answer.status_code == 200, answer.text
            predicted = int(answer.headers["x-gateway-predicted-cached-tokens"])
            assert predicted == cached_tokens(answer.json()["usage"]), (model, salt)
            told.append(predicted > 0)
    assert told == [False, True, False, True, False, False, True, False, True]


def tokenized(worker: httpx.Client) -> float:
    """Requests to the worker's `/tokenize` so far."""
    return sum(
        float(line.rpartition(" ")[2])
        for line in worker.get("/metrics").text.splitlines()
        if line.startswith("http_requests_total{") and 'handler="/tokenize"' in line
    )


def test_real_requests_ids_are_compared_now_and_then(
    served: UpProcess, worker: httpx.Client
) -> None:
    before, wrong = tokenized(worker), served.total(MISMATCHES)
    with httpx.Client(base_url=served.url, timeout=60, trust_env=False) as client:

        def compared() -> bool:
            for path, body in (of_chat(*CALLED, tools=[TOOL]), of_messages(USER)):
                assert client.post(path, json=body).status_code == 200
            return tokenized(worker) >= before + 3

        until("some were compared", compared, 20)
    assert served.total(MISMATCHES) == wrong
