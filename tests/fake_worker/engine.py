"""The engine a fake worker pretends to have: a prefix cache that does cache, and vLLM's counters.

A token is four bytes of the rendered prompt (or one id of a token-id prompt). A block is stored
when its prompt arrives, so equal prompts meet even when they come together; vLLM stores it a step
later.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.fake_worker.kv_events import CLEARED, Event, removed, stored

BYTES_PER_TOKEN = 4
STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def tokens_of(prompt: Any) -> list[bytes]:
    """Token ids of a text, or of a list of ids, as bytes."""
    if isinstance(prompt, list):
        return [str(token).encode() for token in prompt]
    raw = str(prompt).encode("utf-8", "surrogatepass")
    return [raw[i : i + BYTES_PER_TOKEN] for i in range(0, len(raw), BYTES_PER_TOKEN)]


def token_id(token: bytes) -> int:
    return int(token) if token.isdigit() else int.from_bytes(token, "little")


def render(body: dict[str, Any]) -> str:
    """The text a chat template would make of tools and messages."""
    parts = [json.dumps(body["tools"])] if body.get("tools") else []
    for message in body["messages"]:
        content = message.get("content") if isinstance(message, dict) else message
        if not isinstance(content, str):
            content = json.dumps(content)
        role = message.get("role") if isinstance(message, dict) else None
        parts.append(f"<|{role}|>{content}\n")
    return "".join(parts) + "<|assistant|>"


def prompts_of(body: dict[str, Any]) -> list[list[bytes]]:
    """The prompts of a chat or completion body, as tokens."""
    if "messages" in body:
        return [tokens_of(render(body))]
    prompt = body.get("prompt", "")
    if "input" in body:
        prompt = body["input"] if isinstance(body["input"], str) else json.dumps(body["input"])
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return [tokens_of(each) for each in prompt]
    return [tokens_of(prompt)]


class PrefixCache:
    """Chained blocks under least-recently-used eviction, the tail of a chain first. `tell` hears
    of each change, as of one step of the engine."""

    def __init__(self, block_tokens: int, capacity_blocks: int) -> None:
        self.block_tokens = block_tokens
        self.capacity_blocks = capacity_blocks
        self.tell: Callable[[list[Event]], object] = lambda events: None
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def look_up_and_store(self, tokens: list[bytes], salt: str) -> int:
        """Leading tokens that were held; the last token is always computed, as vLLM does."""
        chain = list(self._chain(tokens, salt))
        held = 0
        while held < len(chain) and chain[held] in self._blocks:
            held += 1
        new = [n for n, block in enumerate(chain) if block not in self._blocks]
        events = [self._stored(chain, tokens, new[0])] if new else []
        for block in reversed(chain):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.capacity_blocks:
            events.append(removed([name(self._blocks.popitem(last=False)[0])]))
        if events:
            self.tell(events)
        usable = (len(tokens) - 1) // self.block_tokens if tokens else 0
        return min(held, usable) * self.block_tokens

    def clear(self) -> None:
        self._blocks.clear()
        self.tell([CLEARED])

    def _stored(self, chain: list[bytes], tokens: list[bytes], first: int) -> Event:
        ids = [token_id(token) for token in tokens]
        size = self.block_tokens
        parent = name(chain[first - 1]) if first else None
        told = ids[first * size : len(chain) * size]
        return stored([name(block) for block in chain[first:]], parent, told, size)

    def _chain(self, tokens: list[bytes], salt: str) -> Iterable[bytes]:
        parent = salt.encode()
        for end in range(self.block_tokens, len(tokens) + 1, self.block_tokens):
            block = b"\0".join(tokens[end - self.block_tokens : end])
            parent = hashlib.blake2b(parent + block, digest_size=16).digest()
            yield parent


def name(block: bytes) -> int:
    """Of a block in events."""
    return int.from_bytes(block[-8:], "big")


@dataclass
class Engine:
    """State and counters of one engine, and the text of `/metrics`."""

    model: str
    block_tokens: int = 16
    num_gpu_blocks: int = 4096
    running: int = 0
    waiting: int = 0
    aborted: int = 0
    kv_cache_usage: float = 0.0
    sleep_state: str = "awake"  # awake, weights_offloaded, discard_all
    metric_names: str = "new"  # new, old, none
    engine_labels: tuple[str, ...] = ("0",)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    queries_tokens: int = 0
    hits_tokens: int = 0
    preemptions: int = 0
    process_start_seconds: float = 1_700_000_000.5  # since the epoch
    steps: list[int] = field(default_factory=list)  # tokens of each step
    cache: PrefixCache = field(init=False)

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.block_tokens, self.num_gpu_blocks)

    def prefill(self, body: dict[str, Any]) -> tuple[int, int]:
        """(prompt tokens, cached tokens) of a request, summed over its prompts."""
        prompts = prompts_of(body)
        salt = f"{body.get('model')}|{body.get('cache_salt', '')}"
        total = sum(len(prompt) for prompt in prompts)
        cached = sum(self.cache.look_up_and_store(prompt, salt) for prompt in prompts)
        self.prompt_tokens += total
        self.queries_tokens += total
        self.hits_tokens += cached
        self.steps.append(total - cached)
        return total, cached

    def decode_step(self, tokens: int) -> None:
        self.generation_tokens += tokens
        self.steps.append(tokens)

    def metrics(self) -> str:
        """Prometheus text; with `old`, the names vLLM had before; with `none`, only Python's."""
        lines = [
            "# TYPE process_start_time_seconds gauge",
            f"process_start_time_seconds {self.process_start_seconds}",
        ]
        if self.metric_names == "none":
            return "\n".join(lines) + "\n"
        for name, kind, value in self._series():
            lines.append(f"# HELP {name} .\n# TYPE {name} {kind}")
            lines += [f"{name}{{{self._labels(e)}}} {value}" for e in self.engine_labels]
        lines.append("# TYPE vllm:engine_sleep_state gauge")
        for state in ("awake", "weights_offloaded", "discard_all"):
            value = float(state == self.sleep_state)
            lines += [
                f'vllm:engine_sleep_state{{{self._labels(e)},sleep_state="{state}"}} {value}'
                for e in self.engine_labels
            ]
        lines.append("# TYPE vllm:iteration_tokens_total histogram")
        for engine in self.engine_labels:
            lines += self._histogram(engine)
        lines.append("# TYPE vllm:cache_config_info gauge")
        config = f'block_size="{self.block_tokens}",num_gpu_blocks="{self.num_gpu_blocks}"'
        lines += [
            f'vllm:cache_config_info{{{config},cache_dtype="auto",engine="{e}"}} 1.0'
            for e in self.engine_labels
        ]
        return "\n".join(lines) + "\n"

    def _series(self) -> list[tuple[str, str, float]]:
        prefix, usage = "vllm:prefix_cache", "vllm:kv_cache_usage_perc"
        if self.metric_names == "old":
            prefix, usage = "vllm:gpu_prefix_cache", "vllm:gpu_cache_usage_perc"
        return [
            ("vllm:num_requests_running", "gauge", self.running),
            ("vllm:num_requests_waiting", "gauge", self.waiting),
            (usage, "gauge", self.kv_cache_usage),
            (f"{prefix}_queries_total", "counter", self.queries_tokens),
            (f"{prefix}_hits_total", "counter", self.hits_tokens),
            ("vllm:num_preemptions_total", "counter", self.preemptions),
            ("vllm:prompt_tokens_total", "counter", self.prompt_tokens),
            ("vllm:generation_tokens_total", "counter", self.generation_tokens),
        ]

    def _histogram(self, engine: str) -> list[str]:
        name, labels = "vllm:iteration_tokens_total", self._labels(engine)
        lines = [
            f'{name}_bucket{{{labels},le="{bound}.0"}} {sum(s <= bound for s in self.steps)}.0'
            for bound in STEP_BUCKETS
        ]
        lines.append(f'{name}_bucket{{{labels},le="+Inf"}} {len(self.steps)}.0')
        lines.append(f"{name}_sum{{{labels}}} {sum(self.steps)}.0")
        lines.append(f"{name}_count{{{labels}}} {len(self.steps)}.0")
        return lines

    def _labels(self, engine: str) -> str:
        return f'engine="{engine}",model_name="{self.model}"'
