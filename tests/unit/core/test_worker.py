from __future__ import annotations

import pytest

from gateway.core.blocks import EMPTY_CHAIN
from gateway.core.cost import Coefficients, DecodeEstimate, Estimates, PrefillFit
from gateway.core.reservation import Phase, Reservation, WorkerId
from gateway.core.worker import Worker


class RecordedFit(PrefillFit):
    """Keeps what a worker tells it: tokens uncached and cached, when it began and ended."""

    def __init__(self) -> None:
        super().__init__(Coefficients(0.0, 1e-3, 0.0))
        self.seen: list[tuple[int, int, float, float]] = []

    def observe(
        self, uncached_tokens: int, cached_tokens: int, began: float, ended: float, worker: str = ""
    ) -> None:
        assert worker == "w"
        self.seen.append((uncached_tokens, cached_tokens, began, ended))


def worker_with_fit() -> tuple[Worker, RecordedFit]:
    fit = RecordedFit()
    return Worker(WorkerId("w"), Estimates(fit, DecodeEstimate(1e-2))), fit


def new_worker() -> Worker:
    return worker_with_fit()[0]


def reserve(
    worker: Worker, at: float, seconds: float = 1.0, stream: bool = True, decode: float = 0.5
) -> Reservation:
    reservation = Reservation(
        worker_id=worker.id,
        generation=worker.generation,
        chain=EMPTY_CHAIN,
        cached_tokens=0,
        uncached_tokens=int(seconds * 1000),
        prefill_seconds=seconds,
        decode_seconds=decode,
        stream=stream,
        admitted_at=at,
    )
    worker.reserve(reservation, at)
    return reservation


def test_available_is_ready_and_not_draining() -> None:
    worker = new_worker()
    assert not worker.available
    worker.ready = True
    assert worker.available
    worker.draining = True
    assert not worker.available


def test_prefills_follow_one_another() -> None:
    worker = new_worker()
    first, second = reserve(worker, 0.0), reserve(worker, 0.25, seconds=2.0)
    assert (first.prefill_end, second.prefill_end) == (1.0, 3.0)
    assert worker.prefill_ahead_seconds(0.25) == pytest.approx(2.75)
    assert worker.pending_seconds(0.5) == pytest.approx(2.5 + 1.0)
    assert worker.waiting == worker.in_flight == 2


def test_a_late_prefill_has_nothing_left_but_is_still_waited_for() -> None:
    worker = new_worker()
    reserve(worker, 0.0)
    reserve(worker, 0.0, seconds=2.0)
    assert worker.prefill_ahead_seconds(5.0) == pytest.approx(2.0)
    assert worker.waiting == 2, "streams end their prefill by their first byte alone"


def test_the_first_byte_of_a_stream_ends_its_prefill() -> None:
    worker = new_worker()
    first = reserve(worker, 0.0)
    worker.prefilled(first, 0.75)
    assert (first.phase, first.decode_at, worker.waiting) == (Phase.DECODE, 0.75, 0)
    assert worker.prefill_ahead_seconds(0.75) == 0
    assert worker.pending_seconds(0.75) == 0.5
    worker.prefilled(first, 0.9)
    assert first.decode_at == 0.75, "later bytes change nothing"


def test_plain_answers_admitted_before_a_first_byte_are_past_their_prefill() -> None:
    worker = new_worker()
    before = [reserve(worker, 0.0, stream=False) for _ in range(2)]
    other_stream = reserve(worker, 0.0)
    first = reserve(worker, 0.0)
    after = reserve(worker, 0.0, stream=False)
    worker.prefilled(first, 0.5)
    assert [r.phase for r in before] == [Phase.DECODE] * 2
    assert (other_stream.phase, after.phase) == (Phase.PREFILL, Phase.PREFILL)
    assert worker.waiting == 2


def test_the_estimated_end_of_a_plain_answer_stands() -> None:
    worker = new_worker()
    plain = reserve(worker, 0.0, stream=False)
    behind = reserve(worker, 0.0, stream=False)
    assert worker.pending_seconds(0.5) == pytest.approx(1.5 + 1.0)
    assert plain.phase is Phase.PREFILL
    assert worker.pending_seconds(1.5) == pytest.approx(0.5 + 1.0)
    assert (plain.phase, plain.decode_at) == (Phase.DECODE, 1.0)
    assert worker.pending_seconds(2.0) == pytest.approx(1.0)
    assert behind.decode_at == 2.0


def test_release_gives_back_what_was_taken_in_any_phase() -> None:
    worker = new_worker()
    parts = [0.1, 0.2, 0.3, 0.7, 1e-9, 1e9]
    held = [reserve(worker, 0.0, seconds=part, decode=part) for part in parts]
    for reservation in held[::2]:
        worker.prefilled(reservation, 1.0)
    for reservation in held[1:] + held[:1]:
        worker.release(reservation)
        assert reservation.phase is Phase.SETTLED
    assert (worker.in_flight, worker.waiting) == (0, 0)
    assert (worker.decode_seconds, worker.pending_seconds(1.0)) == (0.0, 0.0)


def test_a_second_release_is_an_error_and_takes_nothing() -> None:
    worker = new_worker()
    first, second = reserve(worker, 0.0), reserve(worker, 0.0)
    worker.release(first)
    with pytest.raises(ValueError, match="settled exactly once"):
        worker.release(first)
    assert (worker.in_flight, worker.waiting) == (1, 1)
    assert worker.pending_seconds(0.0) == pytest.approx(second.prefill_seconds + 0.5)


def test_a_settled_request_has_no_first_byte_any_more() -> None:
    worker, fit = worker_with_fit()
    gone = reserve(worker, 0.0)
    worker.release(gone)
    worker.prefilled(gone, 1.0)
    assert (gone.phase, fit.seen) == (Phase.SETTLED, [])


def test_recent_work_is_remembered_and_fades() -> None:
    worker = new_worker()
    worker.release(reserve(worker, 0.0, seconds=2.0))
    assert worker.recent_seconds(0.0) == pytest.approx(2.0)
    assert worker.recent_seconds(30.0) == pytest.approx(2.0 * 0.3679, rel=1e-3)
    reserve(worker, 30.0, seconds=1.0)
    assert worker.recent_seconds(30.0) == pytest.approx(1.0 + 2.0 * 0.3679, rel=1e-3)
    assert worker.recent_seconds(3000.0) < 1e-9


def test_the_fit_sees_a_stream_s_own_prefill_less_the_wait_ahead() -> None:
    worker, fit = worker_with_fit()
    first, second = reserve(worker, 0.0), reserve(worker, 0.0, seconds=2.0)
    worker.prefilled(first, 1.5)
    worker.prefilled(second, 4.0)
    third = reserve(worker, 10.0)
    worker.prefilled(third, 10.75)
    assert fit.seen == [(1000, 0, 0.0, 1.5), (2000, 0, 1.5, 4.0), (1000, 0, 10.0, 10.75)]


def test_the_fit_sees_no_plain_answers_and_no_earlier_generation() -> None:
    worker, fit = worker_with_fit()
    plain, old = reserve(worker, 0.0, stream=False), reserve(worker, 0.0)
    worker.pending_seconds(5.0)
    assert plain.phase is Phase.DECODE
    worker.generation += 1
    worker.prefilled(old, 6.0)
    assert fit.seen == []


def test_a_late_stream_does_not_lend_its_time_to_the_one_behind_a_plain_answer() -> None:
    worker, fit = worker_with_fit()
    late = reserve(worker, 0.0)
    reserve(worker, 0.0, stream=False)
    behind = reserve(worker, 0.0)
    worker.prefilled(late, 5.0)  # estimated 1.0
    worker.pending_seconds(5.0)  # the plain answer's estimated end, 2.0, has gone by
    worker.prefilled(behind, 7.0)
    assert fit.seen[0] == (1000, 0, 0.0, 5.0)
    assert all(began >= 5.0 for _, _, began, _ in fit.seen[1:]), "it began after the late one"
