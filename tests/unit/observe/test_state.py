from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gateway.core.blocks import Prompt, token_bytes
from gateway.core.cost import GPU_SPEED
from gateway.core.options import Options
from gateway.core.placement import POLICIES
from gateway.core.request import Request, Result
from gateway.core.reservation import WorkerId
from gateway.core.router import Router
from gateway.core.worker import Engine, Loss
from gateway.observe.state import EngineFigures, Sources, StateCollector
from tests.unit.observe.exposed import Samples, of, samples

A, B = WorkerId("0"), WorkerId("1")


def two_workers() -> Router:
    router = Router(Options(policy=POLICIES["least_work"], speed=GPU_SPEED))
    for name in (A, B):
        router.add_worker(name)
        router.set_ready(name, True)
        router.set_engine(name, Engine(16, 1000, 8, 2048))
    return router


def exposed(router: Router, **sources: Callable[..., Any]) -> Samples:
    nothing: dict[str, Callable[..., Any]] = {
        "engines": dict,
        "connections": dict,
        "starts": dict,
        "prompt_modes": dict,
        "token_mismatches": dict,
        "cache_ratio": lambda worker: None,
    }
    registry = CollectorRegistry()
    registry.register(StateCollector(Sources(router=router, **{**nothing, **sources})))
    return samples(registry)


def test_load_is_what_the_router_holds() -> None:
    router = two_workers()
    held = router.admit(Request(Prompt(token_bytes(range(100)), True), stream=True), 0.0)
    found = exposed(router)
    mine, other = held.worker_id, B if held.worker_id == A else A
    assert of(found, "gateway_in_flight_requests", worker=mine) == 1
    assert of(found, "gateway_in_flight_requests", worker=other) == 0
    assert of(found, "gateway_waiting_first_byte_requests", worker=mine) == 1
    assert of(found, "gateway_index_blocks", worker=mine) == 6
    assert of(found, "gateway_worker_cache_blocks", worker=mine) == 1000
    pending = of(found, "gateway_pending_seconds", worker=mine)
    assert pending is not None and pending > 0
    router.settle(held, Result(), 1.0)
    found = exposed(router)
    for name in ("in_flight_requests", "waiting_first_byte_requests", "pending_seconds"):
        assert of(found, f"gateway_{name}", worker=mine) == 0


def test_up_is_whether_it_takes_requests() -> None:
    router = two_workers()
    router.set_ready(A, False, "away")
    found = exposed(router)
    assert of(found, "gateway_worker_up", worker=A) == 0
    assert of(found, "gateway_worker_up", worker=B) == 1
    router.workers[B].draining = True
    assert of(exposed(router), "gateway_worker_up", worker=B) == 0


def test_restarts_are_the_starts_after_the_first() -> None:
    router = two_workers()
    router.new_generation(A, Loss.STARTED)
    found = exposed(router, starts=lambda: {A: 3, B: 0})
    assert of(found, "gateway_worker_restarts_total", worker=A) == 2
    assert of(found, "gateway_worker_restarts_total", worker=B) == 0
    assert of(found, "gateway_worker_generation", worker=A) == 1
    assert of(found, "gateway_worker_cache_losses_total", worker=A, reason="started") == 1
    assert of(found, "gateway_worker_cache_losses_total", worker=A, reason="slept") == 0


def test_the_engine_s_figures_and_the_batch_occupancy() -> None:
    figures = EngineFigures(
        running=2,
        waiting=1,
        kv_usage_ratio=0.25,
        tokens_per_step=512,
        prefix_queries=1000,
        prefix_hits=400,
        preemptions=3,
    )
    found = exposed(two_workers(), engines=lambda: {A: figures})
    for name, value in (
        ("batch_occupancy_ratio", 0.25),
        ("batch_token_occupancy_ratio", 0.25),
        ("engine_running_requests", 2),
        ("engine_waiting_requests", 1),
        ("engine_kv_cache_usage_ratio", 0.25),
        ("engine_cache_hit_ratio", 0.4),
        ("engine_preemptions_total", 3),
    ):
        assert of(found, f"gateway_{name}", worker=A) == value
        assert of(found, f"gateway_{name}", worker=B) is None


ENGINE = [
    "batch_occupancy_ratio",
    "batch_token_occupancy_ratio",
    "engine_running_requests",
    "engine_waiting_requests",
    "engine_kv_cache_usage_ratio",
    "engine_cache_hit_ratio",
    "engine_preemptions_total",
]


@pytest.mark.parametrize("name", ENGINE)
def test_what_the_engine_does_not_tell_is_absent_and_not_0(name: str) -> None:
    found = exposed(two_workers(), engines=lambda: {A: EngineFigures()})
    assert of(found, f"gateway_{name}", worker=A) is None
    assert of(found, "gateway_worker_up", worker=A) == 1


def test_what_the_engine_tells_as_0_is_0() -> None:
    figures = EngineFigures(0, 0, 0, 0, 0, 0, 0)
    found = exposed(two_workers(), engines=lambda: {A: figures})
    for name in ENGINE:
        expected = None if name == "engine_cache_hit_ratio" else 0  # of no queries
        assert of(found, f"gateway_{name}", worker=A) == expected


def test_occupancy_of_unknown_limits_is_absent() -> None:
    router = two_workers()
    router.set_engine(A, Engine())
    found = exposed(router, engines=lambda: {A: EngineFigures(running=2, tokens_per_step=5)})
    assert of(found, "gateway_batch_occupancy_ratio", worker=A) is None
    assert of(found, "gateway_batch_token_occupancy_ratio", worker=A) is None
    assert of(found, "gateway_worker_cache_blocks", worker=A) is None
    assert of(found, "gateway_engine_running_requests", worker=A) == 2


def test_ratios_connections_and_modes() -> None:
    found = exposed(
        two_workers(),
        cache_ratio={A: 0.5, B: None}.get,
        connections=lambda: {A: (3, 1)},
        prompt_modes=lambda: {"org/m": "exact", "other": "bytes"},
    )
    assert of(found, "gateway_cache_hit_ratio", worker=A) == 0.5
    assert of(found, "gateway_cache_hit_ratio", worker=B) is None
    assert of(found, "gateway_upstream_connections", state="active", worker=A) == 3
    assert of(found, "gateway_upstream_connections", state="idle", worker=A) == 1
    assert of(found, "gateway_prompt_mode", model="org/m", mode="exact") == 1
    assert of(found, "gateway_prompt_mode", model="other", mode="bytes") == 1
    assert of(found, "gateway_prompt_mode", model="other", mode="exact") is None


def test_the_fit_is_shown_once_there_is_one() -> None:
    router = two_workers()
    found = exposed(router)
    assert of(found, "gateway_prefill_residual_seconds", worker=A) is None
    assert of(found, "gateway_prefill_seconds_per_token", worker=A) == GPU_SPEED.prefill.b
    for turn in range(2):
        held = router.admit(Request(Prompt(token_bytes(range(900)), True), stream=True), turn * 9.0)
        router.prefilled(held, turn * 9.0 + 3.0)
        router.settle(held, Result(), turn * 9.0 + 4.0)
    assert of(exposed(router), "gateway_prefill_residual_seconds", worker=A) not in (None, 0)


def test_a_worker_that_is_not_there_has_no_series() -> None:
    router = Router(Options(policy=POLICIES["least_work"]))
    assert set(exposed(router)) == {("gateway_session_divergences_total", ())}
