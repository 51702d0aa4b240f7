"""What is a state rather than an event, read when Prometheus asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from time import monotonic

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.core.router import Router
from gateway.core.worker import Loss, Worker


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """The engine's own figures, as scraped; None where it does not tell."""

    running: float | None = None
    waiting: float | None = None
    kv_usage_ratio: float | None = None
    tokens_per_step: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    preemptions: float | None = None


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the collector reads; each is called at every scrape of the gateway."""

    router: Router
    engines: Callable[[], Mapping[str, EngineFigures]]
    connections: Callable[[], Mapping[str, tuple[int, int]]]
    starts: Callable[[], Mapping[str, int]]
    prompt_modes: Callable[[], Mapping[str, str]]
    token_mismatches: Callable[[], Mapping[str, int]]
    cache_ratio: Callable[[str], float | None]


class StateCollector(Collector):
    """Per worker: load, engine and index. A worker that is gone has no series."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        now = monotonic()
        workers = list(self._sources.router.workers.values())
        yield from self._load(workers, now)
        yield from self._caches(workers)
        yield from self._engines(workers)
        yield from self._connections()
        yield from self._prompts()

    def _prompts(self) -> Iterator[Metric]:
        modes = GaugeMetricFamily(
            "gateway_prompt_mode", "1 for the way prompts are read", labels=("model", "mode")
        )
        for model, mode in self._sources.prompt_modes().items():
            modes.add_metric((model, mode), 1.0)
        yield modes
        yield CounterMetricFamily(
            "gateway_session_divergences",
            "Requests of a known session of which no worker had even the first block",
            value=self._sources.router.sessions.diverged,
        )
        mismatches = CounterMetricFamily(
            "gateway_prompt_token_mismatches",
            "Probes, answers and samples whose prompt tokens were not those read here",
            labels=("model",),
        )
        for model, count in self._sources.token_mismatches().items():
            mismatches.add_metric((model,), count)
        yield mismatches

    def _load(self, workers: Iterable[Worker], now: float) -> Iterator[Metric]:
        yield _gauge(
            "worker_up", "1 if the worker takes requests", {w.id: w.available for w in workers}
        )
        yield _gauge(
            "worker_generation",
            "Times that the worker's cache was known to be empty anew",
            {w.id: w.generation for w in workers},
        )
        restarts = CounterMetricFamily(
            "gateway_worker_restarts", "Starts of the worker after its first", labels=("worker",)
        )
        for worker, starts in self._sources.starts().items():
            restarts.add_metric((worker,), starts - 1 if starts else 0)
        yield restarts
        yield _gauge(
            "in_flight_requests",
            "Requests placed and not ended",
            {w.id: w.in_flight for w in workers},
        )
        yield _gauge(
            "waiting_first_byte_requests",
            "Requests placed that have no first token yet",
            {w.id: w.waiting for w in workers},
        )
        yield _gauge(
            "pending_seconds",
            "Estimated unfinished prefill and decode work",
            {w.id: w.pending_seconds(now) for w in workers},
        )
        yield _gauge(
            "prefill_residual_seconds",
            "Mean absolute error of the prefill estimate",
            {
                w.id: w.estimates.prefill.residual_seconds
                for w in workers
                if w.estimates.prefill.observations
            },
        )
        yield _gauge(
            "prefill_seconds_per_token",
            "Fitted seconds of prefill per uncached token",
            {w.id: w.estimates.prefill.coefficients.b for w in workers},
        )

    def _caches(self, workers: Iterable[Worker]) -> Iterator[Metric]:
        ratio = self._sources.cache_ratio
        yield _gauge(
            "cache_hit_ratio",
            "Delivered cached over prompt tokens",
            {w.id: ratio(w.id) for w in workers},
        )
        index = self._sources.router.index
        yield _gauge(
            "index_blocks",
            "Blocks that the worker is believed to hold",
            {w.id: index.blocks(w.id) for w in workers},
        )
        yield _gauge(
            "worker_cache_blocks",
            "Blocks of the engine's cache",
            {w.id: w.engine.capacity_blocks for w in workers},
        )
        yield _gauge(
            "worker_cache_counted_ratio",
            "Share of the engine's cache that counts, by what was delivered of old prompts",
            {w.id: w.belief.share for w in workers},
        )
        evicted = CounterMetricFamily(
            "gateway_index_evicted_blocks",
            "Blocks believed to have made room for others",
            labels=("worker",),
        )
        losses = CounterMetricFamily(
            "gateway_worker_cache_losses",
            "Times that what the worker had cached was gone",
            labels=("worker", "reason"),
        )
        for worker in workers:
            evicted.add_metric((worker.id,), index.evicted(worker.id))
            for why in Loss:
                losses.add_metric((worker.id, why), worker.losses[why])
        yield evicted
        yield losses

    def _engines(self, workers: Iterable[Worker]) -> Iterator[Metric]:
        figures = self._sources.engines()
        known = [(w, figures[w.id]) for w in workers if w.id in figures]
        yield _gauge(
            "batch_occupancy_ratio",
            "Running requests over max_num_seqs",
            {w.id: _share(f.running, w.engine.max_num_seqs) for w, f in known},
        )
        yield _gauge(
            "batch_token_occupancy_ratio",
            "Tokens per engine step over max_num_batched_tokens",
            {w.id: _share(f.tokens_per_step, w.engine.max_num_batched_tokens) for w, f in known},
        )
        yield _gauge(
            "engine_running_requests",
            "Requests in the engine's batch",
            {w.id: f.running for w, f in known},
        )
        yield _gauge(
            "engine_waiting_requests",
            "Requests in the engine's queue",
            {w.id: f.waiting for w, f in known},
        )
        yield _gauge(
            "engine_kv_cache_usage_ratio",
            "Share of the KV cache in use",
            {w.id: f.kv_usage_ratio for w, f in known},
        )
        yield _gauge(
            "engine_cache_hit_ratio",
            "The engine's own prefix cache hits over queries, tokens",
            {w.id: _share(f.prefix_hits, f.prefix_queries) for w, f in known},
        )
        preemptions = CounterMetricFamily(
            "gateway_engine_preemptions", "Requests preempted by the engine", labels=("worker",)
        )
        for worker, f in known:
            if f.preemptions is not None:
                preemptions.add_metric((worker.id,), f.preemptions)
        yield preemptions

    def _connections(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "gateway_upstream_connections", "Connections to the worker", labels=("worker", "state")
        )
        for worker, (active, idle) in self._sources.connections().items():
            family.add_metric((worker, "active"), active)
            family.add_metric((worker, "idle"), idle)
        yield family


def _share(part: float | None, whole: float | int | None) -> float | None:
    return part / whole if part is not None and whole else None


def _gauge(name: str, text: str, values: Mapping[str, float | int | None]) -> Metric:
    """One gauge by worker; what is not known is left out."""
    family = GaugeMetricFamily(f"gateway_{name}", text, labels=("worker",))
    for worker, value in values.items():
        if value is not None:
            family.add_metric((worker,), float(value))
    return family
