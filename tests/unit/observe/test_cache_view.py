from __future__ import annotations

from prometheus_client import CollectorRegistry

from gateway.core.engine_cache import CPU, BlocksStored
from gateway.core.options import Options
from gateway.core.placement import POLICIES
from gateway.core.reservation import WorkerId
from gateway.core.router import Router
from gateway.observe.cache_view import CacheViewCollector, EventFigures
from tests.unit.observe.exposed import Samples, of, samples

A, B = WorkerId("0"), WorkerId("1")


def exposed(router: Router, heard: dict[WorkerId, EventFigures]) -> Samples:
    registry = CollectorRegistry()
    registry.register(CacheViewCollector(router, lambda: heard))
    return samples(registry)


def test_each_worker_has_one_view_and_what_is_heard() -> None:
    router = Router(Options(policy=POLICIES["least_work"]))
    for name in (A, B):
        router.add_worker(name)
    tokens = list(range(8))
    router.caches.apply(A, BlocksStored((1, 2), None, tokens, 4))
    router.caches.apply(A, BlocksStored((2,), None, (), 0, CPU))
    router.caches.apply(A, BlocksStored((9,), 8, tokens[:4], 4))
    router.caches.followed[A].applied()
    found = exposed(router, {A: EventFigures(7, 1, 2, 3, 0.25)})
    for worker, mode in ((A, "events"), (B, "estimate")):
        for each in ("events", "estimate"):
            shown = of(found, "gateway_cache_view", worker=worker, mode=each)
            assert shown == (1 if each == mode else 0)
    for name, value in {
        "events_total": 7,
        "gaps_total": 1,
        "replays_total": 2,
        "unread_batches_total": 3,
        "resets_total": 0,
        "untranslated_blocks_total": 1,
        "lag_seconds": 0.25,
    }.items():
        assert of(found, f"gateway_kv_{name}", worker=A) == value
        assert of(found, f"gateway_kv_{name}", worker=B) is None
    tiers = [of(found, "gateway_kv_blocks", worker=A, tier=tier) for tier in ("gpu", "cpu")]
    assert tiers == [2, 1]


def test_a_loss_is_seen() -> None:
    router = Router(Options(policy=POLICIES["least_work"]))
    router.add_worker(A)
    router.caches.followed[A].applied()
    router.caches.followed[A].lost()
    found = exposed(router, {A: EventFigures(0, 0, 0, 0, None)})
    assert of(found, "gateway_cache_view", worker=A, mode="estimate") == 1
    assert of(found, "gateway_kv_resets_total", worker=A) == 1
    assert of(found, "gateway_kv_lag_seconds", worker=A) is None
