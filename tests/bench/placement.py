"""What it costs the event loop to read a prompt and to place it, from body to decision."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from pathlib import Path
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
from gateway.prompt.reader import Prompts
from gateway.prompt.tokenizer import load_tokenizer
from gateway.prompt.verify import TEXTS
from tests.bench.figures import CannotMeasure
from tests.documents import document

MODEL = Path(".models/SmolLM2-135M-Instruct")
ROUNDS = 300
BLOCK_SIZE, CAPACITY_BLOCKS = 16, 200_000
SIZES = {"6,000 tokens": 6_000, "128,000 tokens": 128_000}
WORKERS = {"2 workers": 2, "1,000 workers": 1_000}


def measure() -> dict[str, object]:
    """Milliseconds of the loop's own thread for a document seen before with a new question."""
    if not MODEL.is_dir():
        raise CannotMeasure(f"there is no {MODEL}; make model")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure())


async def _measure() -> dict[str, object]:
    prompts = Prompts()
    tokenizer = load_tokenizer(MODEL, None)
    prompts.use_exact("m", tokenizer, holds(tokenizer, list(TEXTS.values())))
    found: dict[str, object] = {}
    try:
        for size, tokens in SIZES.items():
            text = _text(tokens)
            for fleet, workers in WORKERS.items():
                router = _router(workers)
                rounds = ROUNDS if tokens < 10_000 else ROUNDS // 10
                took = [await _place(router, prompts, text, i) for i in range(rounds)][2:]
                figures = {"p50_ms": statistics.median(took), "p99_ms": _p99(took)}
                found[f"{size}, {fleet}"] = {k: round(v, 3) for k, v in figures.items()}
    finally:
        prompts.close()
    return found


async def _place(router: Router, prompts: Prompts, text: str, number: int) -> float:
    """Milliseconds of this thread's own time: a new question is tokenised in another one."""
    content = f"{text}\n\nQuestion {number}: what is it about?"
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    began = thread_time()
    call = parse_call(body)
    prompt, fallback = await prompts.read("chat", call.fields)
    now = monotonic()
    reservation = router.admit(Request(prompt, call.model, call.max_tokens, False), now)
    took = thread_time() - began
    assert prompt is not None and prompt.exact, fallback
    usage = Usage(prompt.prompt_tokens, 8, reservation.cached_tokens)
    router.settle(reservation, Result(usage), now + 0.1)
    return took * 1e3


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
