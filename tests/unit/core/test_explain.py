from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.blocks import Prompt, token_bytes
from gateway.core.explain import Explanation, explain
from gateway.core.options import Options
from gateway.core.placement import POLICIES
from gateway.core.request import Request, Result
from gateway.core.reservation import WorkerId
from gateway.core.router import Router


def ask(tokens: int, document: int = 0, exact: bool = True) -> Request:
    return Request(Prompt(token_bytes([document] * tokens), exact), "m")


def router(workers: int = 2, policy: str = "prefix_affinity") -> Router:
    made = Router(Options(POLICIES[policy]))
    for number in range(workers):
        made.add_worker(WorkerId(str(number)))
        made.set_ready(WorkerId(str(number)), True)
    return made


def cost(told: Explanation, worker: str) -> float:
    return next(c.cost_seconds for c in told.candidates if c.worker == worker)


ARRIVALS = st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 3)), max_size=12)


@given(ARRIVALS, st.integers(1, 4000), st.sampled_from(sorted(POLICIES)), st.integers(1, 4))
def test_it_tells_what_admit_does_and_changes_nothing(
    arrivals: list[tuple[int, int]], tokens: int, policy: str, workers: int
) -> None:
    made = router(workers, policy)
    for at, (size, document) in enumerate(arrivals):
        made.admit(ask(size, document), float(at))
    now = float(len(arrivals))
    first, second = (explain(made, ask(tokens), now) for _ in range(2))
    assert first == second
    placed = made.admit(ask(tokens), now)
    assert placed.worker_id == first.worker
    chosen = next(c for c in first.candidates if c.worker == first.worker)
    assert placed.cached_tokens == chosen.cached_tokens
    assert placed.prefill_seconds == chosen.prefill_seconds
    for told in first.candidates:
        terms = told.prefill_ahead_seconds + told.decode_seconds + told.prefill_seconds
        assert told.cost_seconds == pytest.approx(terms + told.delay_to_others_seconds)


def test_a_cached_prompt_says_so() -> None:
    made = router()
    placed = made.admit(ask(1000), 0.0)
    made.settle(placed, Result(), 5.0)
    told = explain(made, ask(1000), 6.0)
    assert (told.worker, told.prompt_tokens, told.mode) == (placed.worker_id, 1000, "exact")
    assert told.block_size == 16
    assert told.reason.startswith(f"worker {told.worker} has 992 of 1000 prompt tokens cached: ")
    assert [c.cached_tokens for c in told.candidates if c.worker != told.worker] == [0]


def test_the_cheaper_one_and_the_rested_one_are_told_apart() -> None:
    made = router()
    assert explain(made, ask(1000), 0.0).reason.startswith("worker 0 is as good as any: ")
    made.admit(ask(30_000), 0.0)
    told = explain(made, ask(1000, 1), 0.0)
    assert told.worker == "1" and told.reason.startswith("worker 1 costs least: ")
    assert cost(told, "1") < cost(told, "0")
    idle = router()
    idle.settle(idle.admit(ask(1000), 0.0), Result(), 1.0)
    rested = explain(idle, ask(100, 1), 2.0)
    assert rested.worker == "1"
    assert rested.reason.startswith("worker 1 costs about as little, and was given less to do")


def test_workers_that_cannot_take_it_are_told_with_their_reason() -> None:
    made = router(3)
    made.set_ready(WorkerId("0"), False, "its process ended")
    made.workers[WorkerId("1")].draining = True
    told = explain(made, ask(100), 0.0)
    assert told.reason == "worker 2 is the only one that can take it"
    assert [(c.available, c.reason) for c in told.candidates][::2] == [
        (False, "its process ended"),
        (True, ""),
    ]
    made.set_ready(WorkerId("2"), False, "not started")
    nobody = explain(made, ask(100), 0.0)
    assert (nobody.worker, nobody.block_size) == (None, None)
    assert nobody.reason == "no worker is available" and len(nobody.candidates) == 3


def test_prompts_that_are_not_exact_say_how_they_are_read() -> None:
    read = explain(router(), ask(1000, exact=False), 0.0)
    assert (read.mode, read.block_size) == ("bytes", 128)
    unread = explain(router(), Request(None), 0.0)
    assert (unread.mode, unread.prompt_tokens) == ("load", 0)


def test_a_model_goes_to_those_that_serve_it() -> None:
    made = router()
    made.set_models(WorkerId("1"), frozenset(("m",)))
    assert explain(made, ask(100), 0.0).reason == "worker 1 is the only one that can take it"


def test_without_any_worker_it_says_so() -> None:
    made = Router(Options(POLICIES["prefix_affinity"]))
    told = explain(made, Request(None), 0.0)
    assert (told.worker, told.reason, told.candidates) == (None, "there is no worker", [])
