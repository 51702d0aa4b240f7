from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

from gateway.observe.tally import Counts, Histograms, TallyCollector

BOUNDS = st.sets(st.integers(-50, 50).map(float), min_size=1, max_size=6).map(sorted)
VALUES = st.lists(st.integers(-60, 60).map(float), max_size=30)


def lines(registry: CollectorRegistry) -> list[str]:
    """What Prometheus would read, less the creation times that prometheus_client adds."""
    text = generate_latest(registry).decode()
    return [line for line in text.splitlines() if "_created" not in line]


@given(BOUNDS, VALUES)
def test_histograms_are_told_as_prometheus_client_s_own_are(
    bounds: list[float], values: list[float]
) -> None:
    theirs, registry = CollectorRegistry(), CollectorRegistry()
    reference = Histogram("h", "Text", ("worker",), buckets=bounds, registry=theirs).labels("0")
    ours = Histograms("h", "Text", ("worker",), bounds)
    registry.register(TallyCollector([ours]))
    mine = ours.at("0")
    for value in values:
        reference.observe(value)
        mine.observe(value)
    assert sorted(lines(registry)) == sorted(lines(theirs))


def test_counters_are_told_as_prometheus_client_s_own_are() -> None:
    theirs, registry = CollectorRegistry(), CollectorRegistry()
    reference = Counter("c", "Text", ("a", "b"), registry=theirs)
    ours = Counts("c", "Text", ("a", "b"))
    registry.register(TallyCollector([ours]))
    for labels, amount in ((("1", "2"), 3), (("1", 'q"\\'), 0), (("1", "2"), 4)):
        reference.labels(*labels).inc(amount)
        ours.at(*labels).value += amount
    assert lines(registry) == lines(theirs)


def test_a_series_is_there_from_the_first_look_at_it() -> None:
    registry = CollectorRegistry()
    counts, histograms = Counts("c", "Text", ("w",)), Histograms("h", "Text", ("w",), (1.0,))
    registry.register(TallyCollector([counts, histograms]))
    counts.at("0")
    assert histograms.at("0") is histograms.at("0")
    assert 'c_total{w="0"} 0.0' in lines(registry)
    assert 'h_bucket{le="+Inf",w="0"} 0.0' in lines(registry)
