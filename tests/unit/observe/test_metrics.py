from __future__ import annotations

import pytest

from gateway.core.blocks import EMPTY_CHAIN
from gateway.core.request import Usage
from gateway.core.reservation import Reservation, WorkerId
from gateway.observe.metrics import Metrics
from gateway.observe.record import Outcome, Record
from tests.unit.observe.exposed import of, samples


def metrics(*workers: str) -> Metrics:
    made = Metrics()
    for worker in workers:
        made.worker_added(worker)
    return made


def answered(worker: str, usage: Usage | None, predicted: int = 0) -> Record:
    return Record(
        10.0,
        outcome=Outcome.OK,
        worker=worker,
        body_read_at=10.001,
        placed_at=10.0012,
        first_byte_at=10.2,
        predicted_cached_tokens=predicted,
        answered=True,
        usage=usage,
    )


def placed(worker: str, cached_tokens: int) -> Reservation:
    return Reservation(
        worker_id=WorkerId(worker),
        generation=1,
        chain=EMPTY_CHAIN,
        cached_tokens=cached_tokens,
        uncached_tokens=1,
        prefill_seconds=0.0,
        decode_seconds=0.0,
        stream=False,
        admitted_at=0.0,
    )


def test_a_worker_s_counters_begin_at_0() -> None:
    found = samples(metrics("0").registry)
    for outcome in Outcome:
        assert of(found, "gateway_requests_total", outcome=outcome, worker="0") == 0
    for name in (
        "gateway_prompt_tokens_total",
        "gateway_predicted_cached_tokens_total",
        "gateway_delivered_cached_tokens_total",
        "gateway_answers_without_usage_total",
    ):
        assert of(found, name, worker="0") == 0


def test_an_answer_is_counted_with_its_times_and_tokens() -> None:
    made = metrics("0", "1")
    made.request_ended(answered("0", Usage(338, 150, 320), predicted=336), 12.0)
    found = samples(made.registry)
    assert of(found, "gateway_requests_total", outcome="ok", worker="0") == 1
    assert of(found, "gateway_requests_total", outcome="ok", worker="1") == 0
    assert of(found, "gateway_prompt_tokens_total", worker="0") == 338
    assert of(found, "gateway_predicted_cached_tokens_total", worker="0") == 336
    assert of(found, "gateway_delivered_cached_tokens_total", worker="0") == 320
    assert of(found, "gateway_answers_without_usage_total", worker="0") == 0
    assert of(found, "gateway_request_duration_seconds_sum", worker="0") == pytest.approx(2.0)
    assert of(found, "gateway_time_to_first_byte_seconds_sum", worker="0") == pytest.approx(0.2)
    assert of(found, "gateway_overhead_seconds_sum") == pytest.approx(0.0002)
    assert of(found, "gateway_prediction_error_tokens_bucket", le="0.0", worker="0") == 0
    assert of(found, "gateway_prediction_error_tokens_bucket", le="16.0", worker="0") == 1


@pytest.mark.parametrize(
    ("predicted", "delivered", "within"),
    [(0, 0, ("-1.0", "0.0")), (0, 100, ("-256.0", "-64.0")), (4096, 0, ("1024.0", "4096.0"))],
)
def test_the_prediction_s_error_has_a_sign(
    predicted: int, delivered: int, within: tuple[str, str]
) -> None:
    made = metrics("0")
    made.request_ended(answered("0", Usage(5000, 1, delivered), predicted), 12.0)
    found = samples(made.registry)
    name = "gateway_prediction_error_tokens_bucket"
    assert [of(found, name, le=le, worker="0") for le in within] == [0, 1]


@pytest.mark.parametrize("usage", [None, Usage(338, 150, None)])
def test_an_answer_without_cached_tokens_is_left_out_of_both_sides(usage: Usage | None) -> None:
    made = metrics("0")
    made.request_ended(answered("0", usage, predicted=100), 12.0)
    found = samples(made.registry)
    assert of(found, "gateway_answers_without_usage_total", worker="0") == 1
    assert of(found, "gateway_prompt_tokens_total", worker="0") == 0
    assert of(found, "gateway_predicted_cached_tokens_total", worker="0") == 0
    assert of(found, "gateway_prediction_error_tokens_count", worker="0") == 0
    assert made.cache_ratio("0") is None


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.OK])
def test_a_request_that_was_not_answered_tells_nothing_of_the_cache(outcome: Outcome) -> None:
    made = metrics("0")
    record = Record(10.0, outcome=outcome, worker="0", predicted_cached_tokens=100)
    made.request_ended(record, 11.0)
    found = samples(made.registry)
    assert of(found, "gateway_requests_total", outcome=outcome, worker="0") == 1
    assert of(found, "gateway_request_duration_seconds_count", worker="0") == 1
    assert of(found, "gateway_time_to_first_byte_seconds_count", worker="0") in (0, None)
    assert of(found, "gateway_answers_without_usage_total", worker="0") == 0


def test_a_request_that_was_never_placed_is_counted_for_no_worker() -> None:
    made = metrics("0")
    made.request_ended(Record(10.0, outcome=Outcome.REFUSED), 11.0)
    found = samples(made.registry)
    assert of(found, "gateway_requests_total", outcome="refused", worker="") == 1
    assert of(found, "gateway_overhead_seconds_count") == 0


def test_why_a_prompt_was_not_exact_is_counted() -> None:
    made = metrics("0")
    for reason in ("unparsed", "option", "option"):
        made.request_ended(Record(10.0, worker="0", fallback=reason), 11.0)
    found = samples(made.registry)
    assert of(found, "gateway_affinity_fallback_total", reason="option") == 2
    assert of(found, "gateway_affinity_fallback_total", reason="unparsed") == 1


def test_the_hit_ratio_is_delivered_over_prompt_tokens() -> None:
    made = metrics("0", "1")
    assert made.cache_ratio("0") is None
    made.request_ended(answered("0", Usage(100, 1, 0)), 12.0)
    made.request_ended(answered("0", Usage(300, 1, 200)), 12.0)
    made.request_ended(answered("0", None), 12.0)
    assert made.cache_ratio("0") == 0.5
    assert made.cache_ratio("1") is None


def test_each_end_adds_no_series() -> None:
    made = metrics("0", "1")
    for outcome in Outcome:
        for worker in ("0", "1", ""):
            made.request_ended(Record(0.0, outcome=outcome, worker=worker), 1.0)
    made.request_ended(answered("0", Usage(1, 1, 1)), 12.0)
    before = samples(made.registry).keys()
    for _ in range(50):
        made.request_ended(answered("1", Usage(1, 1, 1)), 12.0)
        made.request_ended(Record(0.0, outcome=Outcome.REFUSED), 1.0)
    assert samples(made.registry).keys() == before


def test_registries_are_apart() -> None:
    one, other = metrics("0"), metrics("0")
    one.request_ended(answered("0", Usage(5, 1, 1)), 12.0)
    assert of(samples(other.registry), "gateway_prompt_tokens_total", worker="0") == 0


# --- what is remembered of a request


def test_a_record_keeps_its_last_worker_and_its_first_placement() -> None:
    record = Record(10.0)
    record.placed(placed("0", 64), 11.0)
    record.computed = False
    record.placed(placed("1", 0), 12.0)
    assert (record.worker, record.predicted_cached_tokens) == ("1", 0)
    assert (record.placed_at, record.computed) == (11.0, False), "not before it is seen"


def test_a_record_s_outcome_is_a_failure_until_it_is_known() -> None:
    assert Record(0.0).outcome is Outcome.UPSTREAM_ERROR
    assert [str(o) for o in Outcome] == [
        "ok", "client_gone", "refused", "upstream_error", "upstream_truncated", "timeout",
    ]  # fmt: skip


def test_both_views_of_a_cache_are_compared_with_what_was_delivered() -> None:
    made = metrics("0")
    both = answered("0", Usage(100, 1, 64))
    both.estimated_tokens, both.told_tokens = 32, 64
    one = answered("0", Usage(100, 1, 64))
    one.estimated_tokens = 96
    for record in (both, one):
        made.request_ended(record, 11.0)
    found = samples(made.registry)
    name = "gateway_cache_view_error_tokens"
    assert of(found, f"{name}_sum", worker="0", view="estimate") == 64
    assert of(found, f"{name}_count", worker="0", view="estimate") == 2
    assert of(found, f"{name}_bucket", worker="0", view="estimate", le="0.0") == 0
    assert of(found, f"{name}_count", worker="0", view="events") == 1
    assert of(found, f"{name}_bucket", worker="0", view="events", le="0.0") == 1
