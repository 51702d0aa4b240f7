"""Counters and histograms as plain numbers, told to Prometheus when it asks.

prometheus_client's own take a lock and walk the buckets for each observation. Nine of them at the
end of each request cost as much as placing it; everything here runs on the event loop alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

T = TypeVar("T")


class Count:
    """One counter; ``value`` may only grow."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class Buckets:
    """One histogram: ``counts[i]`` values above ``bounds[i - 1]`` and up to ``bounds[i]``."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Bound and number of values up to it, as Prometheus wants them."""
        so_far, found = 0, []
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        for name, count in zip(names, self.counts, strict=True):
            so_far += count
            found.append((name, float(so_far)))
        return found


class _Family(Generic[T]):
    """The series of one metric by their labels."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self.name, self.text, self.labels = name, text, labels
        self.series: dict[tuple[str, ...], T] = {}


class Counts(_Family[Count]):
    def at(self, *labels: str) -> Count:
        """The counter of these labels; the first call makes it, at 0."""
        return self.series.setdefault(labels, Count())

    def family(self) -> Metric:
        family = CounterMetricFamily(self.name, self.text, labels=self.labels)
        for labels, count in self.series.items():
            family.add_metric(labels, count.value)
        return family


class Histograms(_Family[Buckets]):
    def __init__(
        self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]
    ) -> None:
        super().__init__(name, text, labels)
        self._bounds = bounds

    def at(self, *labels: str) -> Buckets:
        """The histogram of these labels; the first call makes it, empty."""
        return self.series.setdefault(labels, Buckets(self._bounds))

    def family(self) -> Metric:
        family = HistogramMetricFamily(self.name, self.text, labels=self.labels)
        for labels, buckets in self.series.items():
            cumulative = buckets.cumulative()
            family.add_metric(labels, cumulative, buckets.total)
            if self._bounds[0] < 0:
                # The family leaves it out with the sum, which may fall here and is no counter.
                named = dict(zip(self.labels, labels, strict=True))
                family.add_sample(f"{self.name}_count", named, cumulative[-1][1])
        return family


class TallyCollector(Collector):
    def __init__(self, tallies: Sequence[Counts | Histograms]) -> None:
        self._tallies = tallies

    def collect(self) -> Iterator[Metric]:
        for tally in self._tallies:
            yield tally.family()
