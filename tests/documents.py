"""Bursts of documents with several questions each, as real chat requests."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import httpx

_WORDS = (
    "river stone castle window garden market winter summer engine letter doctor teacher island "
    "bridge forest mirror candle ladder basket thunder copper silver harbor meadow"
).split()


def document(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(words))


@dataclass(frozen=True)
class Answered:
    """One answer: token counts are the engine's, prediction and worker the gateway's."""

    document: int
    prompt_tokens: int
    cached_tokens: int
    predicted_tokens: int
    worker: str


@dataclass(frozen=True)
class Burst:
    answers: list[Answered]
    seconds: float

    @property
    def cached_share(self) -> float:
        """The engine's own cached tokens over all prompt tokens."""
        return sum(a.cached_tokens for a in self.answers) / sum(
            a.prompt_tokens for a in self.answers
        )

    @property
    def requests_per_second(self) -> float:
        return len(self.answers) / self.seconds


def questions(
    seed: int, documents: int, each: int, words: int, opening: str = ""
) -> list[tuple[int, str]]:
    """(document number, prompt), shuffled; the documents of two seeds share only the opening."""
    rng = random.Random(seed)
    texts = [f"{opening}Text {seed}-{n}. " + document(rng, words) for n in range(documents)]
    prompts = [
        (n, f"{text}\n\nQuestion {q}: what is the text about?")
        for n, text in enumerate(texts)
        for q in range(each)
    ]
    rng.shuffle(prompts)
    return prompts


async def _ask(client: httpx.AsyncClient, model: str, number: int, prompt: str) -> Answered:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return Answered(
        number,
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        int(answer.headers["x-gateway-predicted-cached-tokens"]),
        answer.headers["x-gateway-worker"],
    )


async def _send(url: str, model: str, prompts: list[tuple[int, str]]) -> Burst:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, timeout=300, limits=limits, trust_env=False
    ) as client:
        loop = asyncio.get_running_loop()
        began = loop.time()
        answers = await asyncio.gather(*(_ask(client, model, n, p) for n, p in prompts))
        return Burst(list(answers), loop.time() - began)


def send_burst(url: str, model: str, prompts: list[tuple[int, str]]) -> Burst:
    """All prompts at once; fails if any is not answered."""
    return asyncio.run(_send(url, model, prompts))
