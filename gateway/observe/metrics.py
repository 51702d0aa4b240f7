"""The gateway's metrics, in a registry of its own. The README has the table.

Two kinds: what requests leave behind is counted when they end; what is a state (in-flight,
pending, the engine's own figures) is read when Prometheus asks. A figure that is not known is
absent, never 0. Labels are bounded: worker ids, outcomes, reasons and modes from fixed sets.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

from gateway.observe.record import Outcome, Record

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_OVERHEAD = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
_ERROR_TOKENS = (-4096, -1024, -256, -64, -16, -1, 0, 16, 64, 256, 1024, 4096)


class Metrics:
    """Owns the registry; ``request_ended`` is called once per request."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        worker = ("worker",)
        self._requests = Counter(
            "gateway_requests", "Requests ended", ("outcome", "worker"), registry=registry
        )
        self._prompt = Counter(
            "gateway_prompt_tokens",
            "Prompt tokens of answers with usage",
            worker,
            registry=registry,
        )
        self._predicted = Counter(
            "gateway_predicted_cached_tokens",
            "Prompt tokens that placement expected in the worker's cache",
            worker,
            registry=registry,
        )
        self._delivered = Counter(
            "gateway_delivered_cached_tokens",
            "Prompt tokens that the engine reports to have had in its cache",
            worker,
            registry=registry,
        )
        self._without_usage = Counter(
            "gateway_answers_without_usage",
            "Answers that told no cached tokens, left out of every cache figure",
            worker,
            registry=registry,
        )
        self._error = Histogram(
            "gateway_prediction_error_tokens",
            "Predicted less delivered cached tokens of one request",
            worker,
            buckets=_ERROR_TOKENS,
            registry=registry,
        )
        self._first_byte = Histogram(
            "gateway_time_to_first_byte_seconds",
            "From the request's arrival to the first byte of the answer's body",
            worker,
            buckets=_SECONDS,
            registry=registry,
        )
        self._duration = Histogram(
            "gateway_request_duration_seconds",
            "From the request's arrival to its end",
            worker,
            buckets=_SECONDS,
            registry=registry,
        )
        self._overhead = Histogram(
            "gateway_overhead_seconds",
            "The gateway's own time: from the last byte of the request to its placement",
            buckets=_OVERHEAD,
            registry=registry,
        )
        self._fallback = Counter(
            "gateway_affinity_fallback",
            "Requests placed without exact prompt tokens, by reason",
            ("reason",),
            registry=registry,
        )

    def request_ended(self, record: Record, now: float) -> None:
        """Count one request: its outcome, its times, and what the engine told of its cache."""
        worker = record.worker
        self._requests.labels(record.outcome, worker).inc()
        self._duration.labels(worker).observe(now - record.started_at)
        if record.placed_at is not None and record.body_read_at is not None:
            self._overhead.observe(record.placed_at - record.body_read_at)
        if record.first_byte_at is not None:
            self._first_byte.labels(worker).observe(record.first_byte_at - record.started_at)
        if record.fallback is not None:
            self._fallback.labels(record.fallback).inc()
        if record.answered:
            self._count_tokens(record)

    def _count_tokens(self, record: Record) -> None:
        usage, worker = record.usage, record.worker
        if usage is None or usage.cached_tokens is None:
            self._without_usage.labels(worker).inc()
            return
        self._prompt.labels(worker).inc(usage.prompt_tokens)
        self._predicted.labels(worker).inc(record.predicted_cached_tokens)
        self._delivered.labels(worker).inc(usage.cached_tokens)
        self._error.labels(worker).observe(record.predicted_cached_tokens - usage.cached_tokens)

    def worker_added(self, worker: str) -> None:
        """Create a worker's series at 0, so that a first increase is seen as one."""
        for outcome in Outcome:
            self._requests.labels(outcome, worker)
        for family in (self._prompt, self._predicted, self._delivered, self._without_usage):
            family.labels(worker)

    def cache_ratio(self, worker: str) -> float | None:
        """Delivered cached over prompt tokens since start; None before the first answer."""
        prompt = _value(self._prompt, worker)
        return _value(self._delivered, worker) / prompt if prompt else None

    def expose(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)


def _value(counter: Counter, worker: str) -> float:
    return sum(
        sample.value
        for metric in counter.labels(worker).collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    )
