"""The gateway's metrics, in a registry of its own. The README has the table.

Two kinds: what requests leave behind is counted when they end; what is a state (in-flight,
pending, the engine's own figures) is read when Prometheus asks. A figure that is not known is
absent, never 0. Labels are bounded: worker ids, outcomes, reasons and modes from fixed sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from gateway.core.reservation import Shadow
from gateway.observe.record import Outcome, Record
from gateway.observe.tally import Buckets, Count, Counts, Histograms, TallyCollector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_OVERHEAD = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
_MISSED_TOKENS = (0, 16, 32, 64, 128, 256, 1024, 4096)
_ERROR_TOKENS = (-4096, -1024, -256, -64, -16, -1, 0, 16, 64, 256, 1024, 4096)


_WORKER = ("worker",)


@dataclass(frozen=True, slots=True)
class _Ends:
    """One worker's series, looked up once."""

    requests: dict[Outcome, Count]
    first_byte: Buckets
    duration: Buckets


@dataclass(frozen=True, slots=True)
class _Tokens:
    prompt: Count
    predicted: Count
    delivered: Count
    without_usage: Count
    error: Buckets
    estimate_error: Buckets
    events_error: Buckets

    def count(self, record: Record) -> None:
        usage = record.usage
        if usage is None or usage.cached_tokens is None:
            self.without_usage.value += 1
            return
        self.prompt.value += usage.prompt_tokens
        self.predicted.value += record.predicted_cached_tokens
        self.delivered.value += usage.cached_tokens
        self.error.observe(record.predicted_cached_tokens - usage.cached_tokens)
        self.estimate_error.observe(abs(record.estimated_tokens - usage.cached_tokens))
        if record.told_tokens is not None:
            self.events_error.observe(abs(record.told_tokens - usage.cached_tokens))


class _Shadow:
    """What a second policy would have done, of all requests that were placed."""

    def __init__(self, policy: str) -> None:
        label = ("policy",)
        placed = Counts(
            "gateway_shadow_placements",
            "Requests by whether the shadow policy would have chosen the same worker",
            ("policy", "agrees"),
        )
        gained = Counts(
            "gateway_shadow_gained_cached_tokens",
            "Cached tokens that the shadow policy's worker was believed to have more",
            label,
        )
        lost = Counts(
            "gateway_shadow_lost_cached_tokens",
            "Cached tokens that the shadow policy's worker was believed to have less",
            label,
        )
        self.tallies = (placed, gained, lost)
        self._agrees, self._differs = (placed.at(policy, a) for a in ("yes", "no"))
        self._gained, self._lost = gained.at(policy), lost.at(policy)

    def count(self, record: Record, shadow: Shadow) -> None:
        (self._agrees if shadow.worker_id == record.worker else self._differs).value += 1
        gain = shadow.cached_tokens - record.predicted_cached_tokens
        (self._gained if gain > 0 else self._lost).value += abs(gain)


class Metrics:
    """Owns the registry; ``request_ended`` is called once per request."""

    def __init__(self, shadow_policy: str | None = None) -> None:
        self.registry = CollectorRegistry()
        self._ends: dict[str, _Ends] = {}
        self._tokens: dict[str, _Tokens] = {}
        self._requests = Counts("gateway_requests", "Requests ended", ("outcome", "worker"))
        self._fallback = Counts(
            "gateway_affinity_fallback",
            "Requests placed without exact prompt tokens, by reason",
            ("reason",),
        )
        self._prompt = _counts("prompt_tokens", "Prompt tokens of answers with usage")
        self._predicted = _counts(
            "predicted_cached_tokens", "Prompt tokens that placement expected in the cache"
        )
        self._delivered = _counts(
            "delivered_cached_tokens", "Prompt tokens that the engine reports from its cache"
        )
        self._without_usage = _counts(
            "answers_without_usage", "Answers without cached tokens, left out of every cache figure"
        )
        self._error = _histograms(
            "prediction_error_tokens", "Predicted less delivered cached tokens", _ERROR_TOKENS
        )
        self._view_error = Histograms(
            "gateway_cache_view_error_tokens",
            "Predicted and delivered cached tokens apart, by each view that there was",
            ("worker", "view"),
            _MISSED_TOKENS,
        )
        self._first_byte = _histograms(
            "time_to_first_byte_seconds", "From arrival to the first byte of the body", _SECONDS
        )
        self._duration = _histograms(
            "request_duration_seconds", "From a request's arrival to its end", _SECONDS
        )
        overhead = Histograms(
            "gateway_overhead_seconds",
            "The gateway's own time: from the last byte of the request to its placement",
            (),
            _OVERHEAD,
        )
        self._overhead = overhead.at()
        self._shadow = None if shadow_policy is None else _Shadow(shadow_policy)
        tallies = (
            self._requests, self._fallback, self._prompt, self._predicted, self._delivered,
            self._without_usage, self._error, self._view_error, self._first_byte, self._duration,
            overhead, *(self._shadow.tallies if self._shadow else ()),
        )  # fmt: skip
        self.registry.register(TallyCollector(tallies))

    def request_ended(self, record: Record, now: float) -> None:
        """Count one request: its outcome, its times, and what the engine told of its cache."""
        ends = self._ends.get(record.worker) or self._ends_of(record.worker)
        ends.requests[record.outcome].value += 1
        ends.duration.observe(now - record.started_at)
        if record.placed_at is not None and record.body_read_at is not None:
            self._overhead.observe(record.placed_at - record.body_read_at)
        if record.first_byte_at is not None:
            ends.first_byte.observe(record.first_byte_at - record.started_at)
        if record.fallback is not None:
            self._fallback.at(record.fallback).value += 1
        if self._shadow is not None and record.shadow is not None:
            self._shadow.count(record, record.shadow)
        if record.answered:
            self._tokens[record.worker].count(record)

    def worker_added(self, worker: str) -> None:
        """Create a worker's series at 0, so that a first increase is seen as one."""
        self._ends_of(worker)
        self._tokens[worker] = _Tokens(
            self._prompt.at(worker),
            self._predicted.at(worker),
            self._delivered.at(worker),
            self._without_usage.at(worker),
            self._error.at(worker),
            self._view_error.at(worker, "estimate"),
            self._view_error.at(worker, "events"),
        )

    def _ends_of(self, worker: str) -> _Ends:
        """The series of a worker; of none (``""``) for requests that were not placed."""
        requests = {outcome: self._requests.at(outcome.value, worker) for outcome in Outcome}
        ends = _Ends(requests, self._first_byte.at(worker), self._duration.at(worker))
        self._ends[worker] = ends
        return ends

    def cache_ratio(self, worker: str) -> float | None:
        """Delivered cached over prompt tokens since start; None before the first answer."""
        prompt = self._prompt.at(worker).value
        return self._delivered.at(worker).value / prompt if prompt else None

    def expose(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)


def _counts(name: str, text: str) -> Counts:
    return Counts(f"gateway_{name}", text, _WORKER)


def _histograms(name: str, text: str, bounds: Sequence[float]) -> Histograms:
    return Histograms(f"gateway_{name}", text, _WORKER, bounds)
