"""What a large prefix index costs: a decision among many workers, memory, garbage collection.

Only public methods of the index and the router; each measurement runs in a process of its own,
since memory that Python has once taken says nothing of the next one.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gateway.core.blocks import BlockHash, Chain, Prompt
from gateway.core.options import Options
from gateway.core.placement import prefix_affinity
from gateway.core.prefix_index import PrefixIndex
from gateway.core.request import Request, Result, Usage
from gateway.core.reservation import WorkerId
from gateway.core.router import Router
from gateway.core.worker import Engine
from tests.bench.figures import Figure, as_json, percentile, print_figures

BLOCK_TOKENS = 16
LONG_BLOCKS, MANY_WORKERS, DECISIONS = 8192, 1000, 100
INDEX_BLOCKS, INDEX_WORKERS, PROMPT_BLOCKS = 1_000_000, 8, 512
PROMPTS, CAP_BLOCKS = 50_000, 1_024_000


def chain(number: int, blocks: int) -> Chain:
    """A prompt of its own; hashes look like digests: 64 bits, none near another."""
    start = number * blocks + 1
    hashes = ((start + i) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF for i in range(blocks))
    return Chain(tuple(map(BlockHash, hashes)), BLOCK_TOKENS, blocks * BLOCK_TOKENS + 1)


def request(number: int, blocks: int) -> Request:
    made = chain(number, blocks)
    return Request(Prompt(b"", True, _chains={BLOCK_TOKENS: made}), stream=True)


def router(workers: int, max_index_blocks: int) -> Router:
    made = Router(Options(prefix_affinity, max_index_blocks=max_index_blocks))
    for name in map(WorkerId, map(str, range(workers))):
        made.add_worker(name)
        made.set_engine(name, Engine(BLOCK_TOKENS, 1_000_000))
        made.set_ready(name, True)
    return made


def resident_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def decision() -> dict[str, float]:
    """A prompt that a tenth of the workers hold whole and the others half or not at all."""
    made = router(MANY_WORKERS, 100_000_000)
    prompt = request(0, LONG_BLOCKS)
    whole = chain(0, LONG_BLOCKS)
    half = Chain(whole.hashes[: LONG_BLOCKS // 2], BLOCK_TOKENS, LONG_BLOCKS // 2 * BLOCK_TOKENS)
    for number, name in enumerate(made.workers):
        if number % 10 < 2:
            made.index.store(name, half if number % 10 else whole, 10**9)
    seconds = []
    for turn in range(DECISIONS):
        began = time.perf_counter()
        held = made.admit(prompt, float(turn))
        seconds.append(time.perf_counter() - began)
        made.prefilled(held, turn + 0.1)
        made.settle(held, Result(Usage(LONG_BLOCKS * BLOCK_TOKENS, 1, 0)), turn + 0.2)
    return {"p50_ms": percentile(seconds, 50) * 1e3, "max_ms": max(seconds) * 1e3}


def memory() -> dict[str, float]:
    index = PrefixIndex(2 * INDEX_BLOCKS)
    names = [WorkerId(str(i)) for i in range(INDEX_WORKERS)]
    for name in names:
        index.add(name)
    gc.collect()
    before = resident_mib()
    for number in range(INDEX_BLOCKS // PROMPT_BLOCKS + 1):
        index.store(names[number % INDEX_WORKERS], chain(number, PROMPT_BLOCKS), 10**9)
    grown = resident_mib() - before
    pauses = []
    for _ in range(5):
        began = time.perf_counter()
        gc.collect()
        pauses.append(time.perf_counter() - began)
    blocks = sum(index.blocks(name) for name in names)
    return {"mib": grown, "blocks": blocks, "pause_ms": max(pauses) * 1e3}


def churn() -> dict[str, float]:
    """Distinct prompts far past the cap: memory once the cap is reached, and at the end."""
    made = router(INDEX_WORKERS, CAP_BLOCKS)
    at_cap = 0.0
    stored = 0
    for number in range(PROMPTS):
        held = made.admit(request(number, PROMPT_BLOCKS), float(number))
        made.prefilled(held, number + 0.1)
        made.settle(held, Result(Usage(PROMPT_BLOCKS * BLOCK_TOKENS, 1, 0)), number + 0.2)
        stored += PROMPT_BLOCKS
        # Twice the cap: every worker's share has been filled and has begun to evict.
        if stored == 2 * CAP_BLOCKS:
            at_cap = resident_mib()
    kept = sum(made.index.blocks(name) for name in made.workers)
    return {
        "mib_at_cap": at_cap,
        "grown": resident_mib() / at_cap,
        "kept": kept,
        "evicted": stored - kept,
        "times_cap": stored / CAP_BLOCKS,
    }


PARTS: dict[str, Callable[[], dict[str, float]]] = {
    "decision": decision,
    "memory": memory,
    "churn": churn,
}


def measure() -> dict[str, object]:
    found = {name: _in_a_process(name) for name in PARTS}
    decided, held, churned = found["decision"], found["memory"], found["churn"]
    figures = [
        Figure("decision, 1,000 workers, 128k-token prompt: p50", decided["p50_ms"], "<", 5, "ms"),
        Figure("the same, slowest", decided["max_ms"], "<", None, "ms"),
        Figure("index of 1,000,000 blocks over 8 workers", held["mib"], "<=", 200, "MiB"),
        Figure("blocks in it", held["blocks"], ">=", INDEX_BLOCKS),
        Figure("longest garbage collection with it", held["pause_ms"], "<", 10, "ms"),
        Figure("50,000 distinct 8k-token prompts, times the cap", churned["times_cap"], "=", 25),
        # Tables grow by doubling and shrink again: two of eight differ by 10 MiB at any time.
        Figure("memory at the end over that at twice the cap", churned["grown"], "<=", 1.1),
        Figure("blocks kept", churned["kept"], "<=", CAP_BLOCKS),
        Figure("blocks evicted", churned["evicted"], ">=", PROMPTS * PROMPT_BLOCKS - CAP_BLOCKS),
    ]
    print_figures(figures)
    return {"figures": as_json(figures)}


def _in_a_process(part: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, part], capture_output=True, text=True, check=True, timeout=300
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]]()))
