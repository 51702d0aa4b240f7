"""What the gateway predicts of real caches, by events and by estimate, beside each other."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.documents import document, questions, send_burst
from tests.engine.test_affinity import worker_url
from tests.gateway_process import Samples
from tests.up_process import MODEL_NAME, UpProcess, running
from tests.waiting import until

pytestmark = pytest.mark.timeout(420)

CONVERSATIONS, TURNS, TOGETHER = 40, 5, 8
ERROR = "gateway_cache_view_error_tokens"


@dataclass(frozen=True)
class Seen:
    """One view's predictions between two looks at the metrics."""

    requests: float
    exact: float
    error_tokens: float
    prompt_tokens: float

    @property
    def exact_share(self) -> float:
        return self.exact / self.requests

    @property
    def error_share(self) -> float:
        """Mean absolute error over the mean prompt."""
        return self.error_tokens / self.prompt_tokens


def seen(before: Samples, after: Samples, view: str) -> Seen:
    def grown(name: str, **labels: str) -> float:
        return sum(
            value - before.get((sample, has), 0.0)
            for (sample, has), value in after.items()
            if sample == name and labels.items() <= dict(has).items()
        )

    return Seen(
        grown(f"{ERROR}_count", view=view),
        grown(f"{ERROR}_bucket", view=view, le="0.0"),
        grown(f"{ERROR}_sum", view=view),
        grown("gateway_prompt_tokens_total"),
    )


def both(name: str, before: Samples, after: Samples) -> tuple[Seen, Seen]:
    """By events, by estimate; each has seen every request."""
    told, estimated = seen(before, after, "events"), seen(before, after, "estimate")
    print(
        f"\n{name}: exact {told.exact_share:.3f} with events, {estimated.exact_share:.3f} without;"
        f" mean absolute error {told.error_share:.4f} and {estimated.error_share:.4f} of prompt"
        f" tokens; {told.requests:.0f} requests"
    )
    assert told.requests == estimated.requests > 0, "events were not trusted all the time"
    return told, estimated


async def say(client: httpx.AsyncClient, messages: list[dict[str, str]], tokens: int) -> str:
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


async def converse(client: httpx.AsyncClient, number: int, gate: asyncio.Semaphore) -> None:
    rng = random.Random(number)
    messages: list[dict[str, str]] = []
    async with gate:
        for turn in range(TURNS):
            text = f"{number}-{turn}: " + document(rng, 40)
            messages.append({"role": "user", "content": text})
            said = await say(client, messages, 20)
            messages.append({"role": "assistant", "content": said})


async def conversations(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        gate = asyncio.Semaphore(TOGETHER)
        await asyncio.gather(*(converse(client, n, gate) for n in range(CONVERSATIONS)))


def trusted(up: UpProcess, workers: int) -> bool:
    return up.total("gateway_cache_view", mode="events") == workers


def test_conversations(up: UpProcess) -> None:
    until("events are followed", lambda: trusted(up, 2), 10)
    before = up.samples()
    asyncio.run(conversations(up.url))
    told, estimated = both("conversations", before, up.samples())
    assert told.requests == CONVERSATIONS * TURNS
    assert told.exact_share >= 0.99
    assert estimated.exact_share >= 0.97
    assert up.total("gateway_kv_gaps_total") == up.total("gateway_kv_resets_total") == 0
    assert up.total("gateway_kv_blocks", tier="gpu") > 0


def test_questions_on_new_documents(up: UpProcess) -> None:
    until("events are followed", lambda: trusted(up, 2), 10)
    before = up.samples()
    send_burst(up.url, MODEL_NAME, questions(21, 8, 4, 200))
    told, estimated = both("burst on new documents", before, up.samples())
    assert told.exact_share >= 0.9 and estimated.exact_share >= 0.9


def ask(up: UpProcess, prompt: str, **more: str) -> tuple[int, int]:
    """Predicted and delivered cached tokens."""
    messages = [{"role": "user", "content": prompt}]
    body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 2, **more}
    answer = httpx.post(f"{up.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    predicted = int(answer.headers["x-gateway-predicted-cached-tokens"])
    return predicted, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_cache_salts_are_known_apart(up: UpProcess) -> None:
    until("events are followed", lambda: trusted(up, 2), 10)
    before = up.samples()
    [(_, prompt)] = questions(22, 1, 1, 150)
    for salt in ("x", "y"):
        assert ask(up, prompt, cache_salt=salt) == (0, 0)
        predicted, delivered = ask(up, prompt, cache_salt=salt)
        assert predicted == delivered > 128
    assert ask(up, prompt) == (0, 0)
    told, _ = both("cache salts", before, up.samples())
    assert told.exact_share == 1


def test_a_reset_is_known_from_the_engines_next_step_on(up: UpProcess) -> None:
    until("events are followed", lambda: trusted(up, 2), 10)
    prompts = [prompt for _, prompt in questions(23, 4, 1, 150)]
    for prompt in prompts:
        ask(up, prompt)
    for worker in ("0", "1"):
        reset = httpx.post(f"{worker_url(up, worker)}/reset_prefix_cache", timeout=30)
        assert reset.status_code == 200
    send_burst(up.url, MODEL_NAME, questions(24, 6, 1, 150))  # steps of both
    until("both are known to be reset", lambda: up.total("gateway_kv_blocks", tier="gpu") < 60, 10)
    for prompt in prompts:
        assert ask(up, prompt) == (0, 0)


# --- a cache far too small

DOCUMENTS, ASKED, WORDS = 30, 80, 160
BLOCKS = 48


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    """One worker whose cache holds a few documents."""
    folder: Path = tmp_path_factory.mktemp("small")
    vllm = ["--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "1024"]
    with running(UpProcess(folder, ["--cpu-workers", "1"], vllm), 1) as gateway:
        yield gateway


async def ask_zipf(url: str) -> None:
    rng = random.Random(5)
    texts = [f"Text {n}. " + document(rng, WORDS) for n in range(DOCUMENTS)]
    weights = [1 / (rank + 1) for rank in range(DOCUMENTS)]
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        gate = asyncio.Semaphore(2)

        async def ask(number: int) -> None:
            text = rng.choices(texts, weights)[0]
            async with gate:
                prompt = f"{text}\n\nQuestion {number}: what is the text about?"
                await say(client, [{"role": "user", "content": prompt}], 8)

        await asyncio.gather(*(ask(n) for n in range(ASKED)))


def test_a_cache_far_too_small(small: UpProcess) -> None:
    until("events are followed", lambda: trusted(small, 1), 10)
    before = small.samples()
    asyncio.run(ask_zipf(small.url))
    after = small.samples()
    told, estimated = both("small cache", before, after)
    assert small.total("gateway_kv_blocks", tier="gpu") <= BLOCKS
    assert told.error_share < 0.03
    assert estimated.error_share < 0.1
