"""The OpenAI Python SDK pointed at the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from tests.up_process import MODEL_NAME, UpProcess

pytestmark = pytest.mark.timeout(420)

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(up: UpProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL_NAME, messages=QUESTION, max_tokens=40, temperature=0
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None


def test_raw_headers(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL_NAME,
        messages=QUESTION,
        max_tokens=1,
        extra_headers={"X-Request-Id": "sdk-test.1"},
    )
    assert raw.headers["x-request-id"] == "sdk-test.1"
    assert raw.headers["x-gateway-worker"] in ("0", "1")


def test_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL_NAME, messages=QUESTION, max_tokens=40, temperature=0, stream=True
    )
    chunks = list(stream)
    assert all(chunk.choices for chunk in chunks), "a usage chunk that nobody asked for"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert "Paris" in text


def test_stream_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL_NAME,
        messages=QUESTION,
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    *rest, last = list(stream)
    assert all(chunk.choices for chunk in rest)
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 4


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL_NAME, prompt="Once upon a time", max_tokens=8)
    assert answer.choices[0].text
    parts = client.completions.create(
        model=MODEL_NAME, prompt=[504, 3575, 260], max_tokens=8, stream=True
    )
    assert "".join(part.choices[0].text for part in parts)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL_NAME]
    assert client.models.retrieve(MODEL_NAME).id == MODEL_NAME


def test_errors_become_the_sdks_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nope"):
        client.chat.completions.create(model="nope", messages=QUESTION)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL_NAME, messages=QUESTION, max_tokens=10**6)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model=MODEL_NAME, messages=QUESTION, max_tokens=10**6, stream=True
        )
    with pytest.raises(openai.NotFoundError, match="nope"):
        client.models.retrieve("nope")


def test_many_at_once_with_the_async_client(up: UpProcess) -> None:
    async def ask() -> list[str]:
        base_url = f"{up.url}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:

            async def plain(n: int) -> str:
                answer = await client.chat.completions.create(
                    model=MODEL_NAME,
                    messages=[{"role": "user", "content": f"Count to {n}."}],
                    max_tokens=8,
                )
                return answer.choices[0].message.content or ""

            async def streamed(n: int) -> str:
                stream = await client.chat.completions.create(
                    model=MODEL_NAME,
                    messages=[{"role": "user", "content": f"Count from {n}."}],
                    max_tokens=8,
                    stream=True,
                )
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            jobs = [plain(n) for n in range(8)] + [streamed(n) for n in range(8)]
            return list(await asyncio.gather(*jobs))

    assert all(asyncio.run(ask()))
    assert up.total("gateway_in_flight_requests") == 0
