"""What a worker tells of itself under ``/metrics``: the few figures that the gateway reads.

vLLM has renamed metrics over its releases; each figure is looked for under all its names. A
figure that is absent is None, never 0. With several ``engine`` labels counts are summed, ratios
averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import fmean

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_RUNNING = ("vllm:num_requests_running",)
_WAITING = ("vllm:num_requests_waiting",)
_KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
_HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
_PREEMPTIONS = ("vllm:num_preemptions_total",)
_STEP_TOKENS = ("vllm:iteration_tokens_total_sum",)
_STEPS = ("vllm:iteration_tokens_total_count",)
_CONFIG = ("vllm:cache_config_info",)
_PROCESS_START = ("process_start_time_seconds",)
_SLEEP = ("vllm:engine_sleep_state",)
_WANTED = (
    _RUNNING, _WAITING, _KV_USAGE, _QUERIES, _HITS, _PREEMPTIONS, _STEP_TOKENS, _STEPS, _CONFIG,
    _PROCESS_START, _SLEEP,
)  # fmt: skip
_PREFIXES = tuple(name for names in _WANTED for name in names)


@dataclass(frozen=True, slots=True)
class Scrape:
    """Figures of one scrape; tokens are tokens, ``kv_usage_ratio`` is 0 to 1.

    ``asleep``: an engine of it is not awake. ``tokens_per_step``: mean tokens of the engine's steps
    since the scrape before, 0 when it made none.
    """

    running: float | None = None
    waiting: float | None = None
    kv_usage_ratio: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    preemptions: float | None = None
    step_tokens: float | None = None
    steps: float | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    process_start: float | None = None
    tokens_per_step: float | None = None
    asleep: bool = False


def parse_scrape(text: str, before: Scrape | None) -> Scrape:
    """Figures from Prometheus text; lines of other metrics are not even parsed."""
    wanted = "\n".join(line for line in text.splitlines() if line.startswith(_PREFIXES)) + "\n"
    samples: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(wanted):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    config = next((s for name in _CONFIG for s in samples.get(name, ())), None)
    labels = {} if config is None else config.labels
    found = Scrape(
        running=_read(samples, _RUNNING, sum),
        waiting=_read(samples, _WAITING, sum),
        kv_usage_ratio=_read(samples, _KV_USAGE, fmean),
        prefix_queries=_read(samples, _QUERIES, sum),
        prefix_hits=_read(samples, _HITS, sum),
        preemptions=_read(samples, _PREEMPTIONS, sum),
        step_tokens=_read(samples, _STEP_TOKENS, sum),
        steps=_read(samples, _STEPS, sum),
        block_size=_count(labels.get("block_size")),
        num_blocks=_count(labels.get("num_gpu_blocks")),
        process_start=_read(samples, _PROCESS_START, max),
        asleep=any(
            sample.value == 1 and sample.labels.get("sleep_state") != "awake"
            for name in _SLEEP
            for sample in samples.get(name, ())
        ),
    )
    return replace(found, tokens_per_step=_tokens_per_step(found, before))


def _tokens_per_step(now: Scrape, before: Scrape | None) -> float | None:
    if before is None or now.steps is None or now.step_tokens is None:
        return None
    if before.steps is None or before.step_tokens is None or now.steps < before.steps:
        return None
    steps = now.steps - before.steps
    return (now.step_tokens - before.step_tokens) / steps if steps else 0.0


def _read(
    samples: dict[str, list[Sample]],
    names: tuple[str, ...],
    join: Callable[[Iterable[float]], float],
) -> float | None:
    for name in names:
        if name in samples:
            return join([sample.value for sample in samples[name]])
    return None


def _count(label: str | None) -> int | None:
    return int(label) if label is not None and label.isdigit() and int(label) > 0 else None
