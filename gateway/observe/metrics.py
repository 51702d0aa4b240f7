"""The gateway's metrics, in a registry of its own. The README has the table.

Two kinds: what requests leave behind is counted when they end; what is a state (in-flight,
pending, the engine's own figures) is read when Prometheus asks. A figure that is not known is
absent, never 0. Labels are bounded: worker ids, outcomes, reasons and modes from fixed sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

from gateway.observe.record import Outcome, Record

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_OVERHEAD = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
_ERROR_TOKENS = (-4096, -1024, -256, -64, -16, -1, 0, 16, 64, 256, 1024, 4096)


@dataclass(frozen=True, slots=True)
class _Ends:
    """One worker's series, looked up once: finding one by its labels costs more than counting."""

    requests: dict[Outcome, Counter]
    first_byte: Histogram
    duration: Histogram


@dataclass(frozen=True, slots=True)
class _Tokens:
    prompt: Counter
    predicted: Counter
    delivered: Counter
    without_usage: Counter
    error: Histogram

    def count(self, record: Record) -> None:
        usage = record.usage
        if usage is None or usage.cached_tokens is None:
            self.without_usage.inc()
            return
        self.prompt.inc(usage.prompt_tokens)
        self.predicted.inc(record.predicted_cached_tokens)
        self.delivered.inc(usage.cached_tokens)
        self.error.observe(record.predicted_cached_tokens - usage.cached_tokens)


class Metrics:
    """Owns the registry; ``request_ended`` is called once per request."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ends: dict[str, _Ends] = {}
        self._tokens: dict[str, _Tokens] = {}
        self._requests = Counter(
            "gateway_requests", "Requests ended", ("outcome", "worker"), registry=self.registry
        )
        self._fallback = Counter(
            "gateway_affinity_fallback",
            "Requests placed without exact prompt tokens, by reason",
            ("reason",),
            registry=self.registry,
        )
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of answers with usage")
        self._predicted = self._counter(
            "predicted_cached_tokens", "Prompt tokens that placement expected in the cache"
        )
        self._delivered = self._counter(
            "delivered_cached_tokens", "Prompt tokens that the engine reports from its cache"
        )
        self._without_usage = self._counter(
            "answers_without_usage", "Answers without cached tokens, left out of every cache figure"
        )
        self._error = self._histogram(
            "prediction_error_tokens", "Predicted less delivered cached tokens", _ERROR_TOKENS
        )
        self._first_byte = self._histogram(
            "time_to_first_byte_seconds", "From arrival to the first byte of the body", _SECONDS
        )
        self._duration = self._histogram(
            "request_duration_seconds", "From a request's arrival to its end", _SECONDS
        )
        self._overhead = Histogram(
            "gateway_overhead_seconds",
            "The gateway's own time: from the last byte of the request to its placement",
            buckets=_OVERHEAD,
            registry=self.registry,
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"gateway_{name}", text, ("worker",), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(
            f"gateway_{name}", text, ("worker",), buckets=buckets, registry=self.registry
        )

    def request_ended(self, record: Record, now: float) -> None:
        """Count one request: its outcome, its times, and what the engine told of its cache."""
        ends = self._ends.get(record.worker) or self._ends_of(record.worker)
        ends.requests[record.outcome].inc()
        ends.duration.observe(now - record.started_at)
        if record.placed_at is not None and record.body_read_at is not None:
            self._overhead.observe(record.placed_at - record.body_read_at)
        if record.first_byte_at is not None:
            ends.first_byte.observe(record.first_byte_at - record.started_at)
        if record.fallback is not None:
            self._fallback.labels(record.fallback).inc()
        if record.answered:
            self._tokens[record.worker].count(record)

    def worker_added(self, worker: str) -> None:
        """Create a worker's series at 0, so that a first increase is seen as one."""
        self._ends_of(worker)
        self._tokens[worker] = _Tokens(
            self._prompt.labels(worker),
            self._predicted.labels(worker),
            self._delivered.labels(worker),
            self._without_usage.labels(worker),
            self._error.labels(worker),
        )

    def _ends_of(self, worker: str) -> _Ends:
        """The series of a worker; of none (``""``) for requests that were not placed."""
        requests = {outcome: self._requests.labels(outcome, worker) for outcome in Outcome}
        ends = _Ends(requests, self._first_byte.labels(worker), self._duration.labels(worker))
        self._ends[worker] = ends
        return ends

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
