"""Which view of each worker's cache is believed, and how its events are heard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.core.engine_cache import TIERS
from gateway.core.reservation import WorkerId
from gateway.core.router import Router

_VIEWS = ("events", "estimate")


@dataclass(frozen=True, slots=True)
class EventFigures:
    """Counts over all starts of a worker; seconds from an engine's step to its batch being here."""

    events: int
    gaps: int
    replays: int
    unread_batches: int
    lag_seconds: float | None


class CacheViewCollector(Collector):
    """``heard`` has those workers only whose events are followed."""

    def __init__(
        self, router: Router, heard: Callable[[], Mapping[WorkerId, EventFigures]]
    ) -> None:
        self._router = router
        self._heard = heard

    def collect(self) -> Iterator[Metric]:
        view = GaugeMetricFamily(
            "gateway_cache_view",
            "1 for the view of the worker's cache that prompts are placed by",
            labels=("worker", "mode"),
        )
        caches = self._router.caches.followed
        for worker, followed in caches.items():
            for mode in _VIEWS:
                view.add_metric((worker, mode), followed.trusted == (mode == "events"))
        yield view
        heard = self._heard()
        yield _counter("events", "Events of the engine's cache", _each(heard, "events"))
        yield _counter("gaps", "Gaps in the numbers of batches", _each(heard, "gaps"))
        yield _counter("replays", "Replays of batches asked for", _each(heard, "replays"))
        yield _counter(
            "unread_batches", "Batches that could not be read", _each(heard, "unread_batches")
        )
        followed_by = {w: caches[w] for w in heard}
        yield _counter(
            "resets",
            "Times that events were missing for good",
            {w: f.resets for w, f in followed_by.items()},
        )
        yield _counter(
            "untranslated_blocks",
            "Blocks told of whose tokens or parents are not known",
            {w: f.cache.untranslated for w, f in followed_by.items()},
        )
        lag = GaugeMetricFamily(
            "gateway_kv_lag_seconds",
            "From the engine's step to its last batch being here",
            labels=("worker",),
        )
        for worker, figures in heard.items():
            if figures.lag_seconds is not None:
                lag.add_metric((worker,), figures.lag_seconds)
        yield lag
        blocks = GaugeMetricFamily(
            "gateway_kv_blocks", "Blocks that the engine holds", labels=("worker", "tier")
        )
        for worker, followed in followed_by.items():
            for tier in TIERS:
                blocks.add_metric((worker, tier), followed.cache.blocks(tier))
        yield blocks


def _each(heard: Mapping[WorkerId, EventFigures], name: str) -> dict[WorkerId, float]:
    return {worker: getattr(figures, name) for worker, figures in heard.items()}


def _counter(name: str, text: str, values: Mapping[WorkerId, float]) -> Metric:
    family = CounterMetricFamily(f"gateway_kv_{name}", text, labels=("worker",))
    for worker, value in values.items():
        family.add_metric((worker,), value)
    return family
