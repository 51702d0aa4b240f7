"""With events, the gateway predicts what a cache holds, whatever it evicts, loses or forgets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.bodies import COMPLETIONS
from tests.conftest import StartGateway
from tests.fake_worker import FakeWorker
from tests.fake_worker.kv_events import EventPublisher
from tests.gateway_process import GatewayProcess
from tests.raw_http import exchange
from tests.waiting import until

CAPACITY_BLOCKS = 24
_fresh = itertools.count(1)


@pytest.fixture
def engine() -> Iterator[FakeWorker]:
    """One worker with a small cache."""
    with FakeWorker() as worker:
        worker.engine.cache.capacity_blocks = CAPACITY_BLOCKS
        yield worker


@pytest.fixture
def events(engine: FakeWorker) -> Iterator[EventPublisher]:
    with EventPublisher() as publisher:
        engine.tell(publisher)
        yield publisher


@pytest.fixture
def told(engine: FakeWorker, events: EventPublisher, start_gateway: StartGateway) -> GatewayProcess:
    """A gateway that follows the worker's events."""
    replay_port = events.replay_url.rpartition(":")[2]
    at = f"{events.url}+{replay_port}"
    gateway = start_gateway("--worker-kv-events", at, workers=[engine.url])
    until("its events are followed", lambda: believes(gateway, "events"))
    return gateway


def believes(gateway: GatewayProcess, mode: str) -> bool:
    return gateway.total("gateway_cache_view", mode=mode) == 1


def text(blocks: int) -> list[int]:
    """Token ids of a prompt like no other, and one token behind its last block."""
    first = next(_fresh) * 100_000
    return list(range(first, first + 16 * blocks + 1))


def ask(gateway: GatewayProcess, ids: list[int], **more: object) -> tuple[int, int]:
    """Predicted and delivered cached tokens."""
    model = "fake-model"
    body = {"model": model, "prompt": ids, "max_tokens": 1, **more}
    answer = exchange(gateway.url, COMPLETIONS, body)
    assert answer.status == 200, answer.body
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return int(answer.header("x-gateway-predicted-cached-tokens") or -1), cached


def caught_up(gateway: GatewayProcess, engine: FakeWorker) -> None:
    """All that the engine did is known."""
    until(
        "the gateway has heard all",
        lambda: gateway.total("gateway_kv_blocks", tier="gpu") == len(engine.engine.cache),
    )


def test_evicted_blocks_are_known_to_be_gone(
    told: GatewayProcess, engine: FakeWorker, events: EventPublisher
) -> None:
    texts = [text(5) for _ in range(8)]
    for number in (0, 1, 2, 3, 4, 5, 0, 7, 5, 4, 6, 4, 1, 0, 0, 7):
        predicted, cached = ask(told, texts[number])
        assert predicted == cached
        caught_up(told, engine)
    name = "gateway_cache_view_error_tokens"
    assert told.total(f"{name}_sum", view="events") == 0
    assert told.total(f"{name}_count", view="events") == 16
    assert told.total("gateway_kv_blocks", tier="gpu") == CAPACITY_BLOCKS


def test_equal_prompts_that_arrive_together_are_expected_there(
    told: GatewayProcess, engine: FakeWorker
) -> None:
    ids = text(4)
    engine.say(gates={"body": "go"})
    with ThreadPoolExecutor() as threads:
        first = threads.submit(ask, told, ids)
        engine.wait_inference(1)
        second = threads.submit(ask, told, ids)
        engine.wait_inference(2)
        engine.open_gate("go")
        assert (first.result(10), second.result(10)) == ((0, 0), (64, 64))


def test_a_reset_from_outside_is_seen(
    told: GatewayProcess, engine: FakeWorker, events: EventPublisher
) -> None:
    ids = text(4)
    ask(told, ids)
    caught_up(told, engine)
    engine.engine.cache.clear()
    until("the cache is empty", lambda: told.total("gateway_kv_blocks") == 0)
    assert ask(told, ids) == (0, 0)


def test_a_lost_batch_is_replayed(
    told: GatewayProcess, engine: FakeWorker, events: EventPublisher
) -> None:
    lost = text(4)
    events.losing = "on the way"
    ask(told, lost)
    events.losing = "no"
    ask(told, text(1))
    caught_up(told, engine)
    assert ask(told, lost) == (64, 64)
    assert told.total("gateway_kv_gaps_total") == 1
    assert told.total("gateway_kv_resets_total") == 0
    assert believes(told, "events")


def test_a_batch_lost_for_good_leaves_the_estimate(
    told: GatewayProcess, engine: FakeWorker, events: EventPublisher
) -> None:
    ids = text(4)
    events.losing = "for good"
    ask(told, ids)
    events.losing = "no"
    ask(told, text(1))
    until("the estimate is believed", lambda: believes(told, "estimate"))
    assert told.total("gateway_kv_resets_total") == 1
    assert ask(told, ids) == (64, 64), "by estimate"
    engine.engine.cache.clear()
    until("the events are believed again", lambda: believes(told, "events"))
    assert ask(told, ids) == (0, 0)


def test_events_that_stop_leave_the_estimate_until_they_come_again(
    told: GatewayProcess, engine: FakeWorker, events: EventPublisher
) -> None:
    events.losing = "on the way"
    texts = [text(2) for _ in range(3)]
    for ids in texts:
        ask(told, ids)
    assert believes(told, "estimate")
    assert ask(told, texts[0]) == (32, 32)
    events.losing = "no"
    ask(told, text(2))
    until("the events are believed again", lambda: believes(told, "events"))
    assert ask(told, texts[1]) == (32, 32)


def test_another_engine_at_the_same_address(
    told: GatewayProcess, engine: FakeWorker, events: EventPublisher
) -> None:
    ids = text(4)
    ask(told, ids)
    caught_up(told, engine)
    engine.engine.cache.tell = lambda published: None
    engine.engine.cache.clear()
    events.restart()
    engine.tell(events)
    engine.set(process_start_seconds=1_800_000_000.0)
    until("the restart is seen", lambda: told.total("gateway_worker_restarts_total") == 1)
    until("its events are followed", lambda: believes(told, "events"))
    assert ask(told, ids) == (0, 0)
    caught_up(told, engine)
    assert ask(told, ids) == (64, 64)


def test_a_gateway_that_comes_later_knows_what_is_there(
    engine: FakeWorker, events: EventPublisher, start_gateway: StartGateway
) -> None:
    first = start_gateway(workers=[engine.url])
    ids = text(4)
    ask(first, ids)
    port = events.replay_url.rpartition(":")[2]
    later = start_gateway("--worker-kv-events", f"{events.url}+{port}", workers=[engine.url])
    until("its events are followed", lambda: believes(later, "events"))
    assert ask(later, ids) == (64, 64)
    assert believes(first, "estimate") and first.total("gateway_kv_events_total") == 0
