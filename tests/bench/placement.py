"""What it costs the event loop to read a prompt and to place it, from body to decision."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from statistics import median
from time import monotonic, thread_time

import uvloop

from gateway.api.wire import parse_call
from gateway.core.options import Options
from gateway.core.placement import POLICIES
from gateway.core.request import Request, Result, Usage
from gateway.core.reservation import WorkerId
from gateway.core.router import Router
from gateway.core.worker import Engine
from gateway.prompt.memo import holds
from gateway.prompt.reader import ExactModel, Prompts
from gateway.prompt.tokenizer import load_tokenizer
from gateway.prompt.trust import Trust
from gateway.prompt.verify import TEXTS
from tests.bench.figures import CannotMeasure, Figure, as_json, print_figures
from tests.documents import document

MODEL = Path(".models/SmolLM2-135M-Instruct")
ROUNDS, LONG_ROUNDS = 300, 30
BLOCK_SIZE, CAPACITY_BLOCKS = 16, 200_000
SHORT, LONG = 6_000, 128_000


def measure() -> dict[str, object]:
    """Milliseconds of the loop's own thread for a document seen before with a new question."""
    if not MODEL.is_dir():
        raise CannotMeasure(f"there is no {MODEL}; make model")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures = runner.run(_measure())
    print_figures(figures)
    return {"figures": as_json(figures)}


async def _measure() -> list[Figure]:
    prompts = Prompts()
    tokenizer = load_tokenizer(MODEL, None)
    by_pieces = holds(tokenizer, list(TEXTS.values()))
    prompts.use_exact("m", ExactModel(tokenizer, Trust(), by_pieces))
    try:
        short, _ = await _rounds(prompts, 2, SHORT, ROUNDS)
        long, _ = await _rounds(prompts, 2, LONG, LONG_ROUNDS)
        _, many = await _rounds(prompts, 1_000, LONG, LONG_ROUNDS)
    finally:
        prompts.close()
    text = "text to decision, known prefix"
    return [
        Figure(f"{SHORT:,} tokens, {text}: p50", median(short), "<=", 0.3, "ms"),
        Figure(f"{SHORT:,} tokens, {text}: p99", _p99(short), "<=", 1, "ms"),
        Figure(f"{LONG:,} tokens, {text}: p50", median(long), "<=", 3, "ms"),
        Figure(f"{LONG:,} tokens, 1,000 workers, decision: p50", median(many), "<", 5, "ms"),
    ]


async def _rounds(
    prompts: Prompts, workers: int, tokens: int, rounds: int
) -> tuple[list[float], list[float]]:
    """From the body to the decision, and the decision alone."""
    router, text = _router(workers), _text(tokens)
    took = [await _place(router, prompts, text, number) for number in range(rounds)][2:]
    return [whole for whole, _ in took], [decision for _, decision in took]


async def _place(router: Router, prompts: Prompts, text: str, number: int) -> tuple[float, float]:
    """Milliseconds of this thread's own time: a new question is tokenised in another one."""
    content = f"{text}\n\nQuestion {number}: what is it about?"
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    began = thread_time()
    call = parse_call(body)
    reading = await prompts.read("chat", call.fields)
    prompt = reading.prompt
    read, now = thread_time(), monotonic()
    reservation = router.admit(Request(prompt, call.model, call.max_tokens, False), now)
    ended = thread_time()
    assert prompt is not None and prompt.exact, reading.fallback
    usage = Usage(prompt.prompt_tokens, 8, reservation.cached_tokens)
    router.settle(reservation, Result(usage), now + 0.1)
    return (ended - began) * 1e3, (ended - read) * 1e3


def _router(workers: int) -> Router:
    router = Router(Options(policy=POLICIES["prefix_affinity"], max_index_blocks=10**8))
    for number in range(workers):
        worker = WorkerId(str(number))
        router.add_worker(worker)
        router.set_ready(worker, True)
        router.set_engine(worker, Engine(BLOCK_SIZE, CAPACITY_BLOCKS))
    return router


def _text(tokens: int) -> str:
    """A word of the list is 1.04 tokens in the mean."""
    return document(random.Random(tokens), round(tokens / 1.04))


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]
