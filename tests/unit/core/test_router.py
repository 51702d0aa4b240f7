from __future__ import annotations

import random
from collections import Counter

import pytest

from gateway.core.blocks import Prompt, token_bytes
from gateway.core.cost import CPU_SPEED, GPU_SPEED, Speed
from gateway.core.options import Options
from gateway.core.placement import POLICIES
from gateway.core.request import Request, Result, Usage
from gateway.core.reservation import Reservation, WorkerId
from gateway.core.router import NoWorker, Router
from gateway.core.worker import Engine, Loss

A, B = WorkerId("a"), WorkerId("b")
BLOCK = 16
NOT_COMPUTED = Result(computed=False)


def router(
    policy: str = "prefix_affinity",
    workers: int = 2,
    speed: Speed = GPU_SPEED,
    engine: Engine | None = None,
) -> Router:
    made = Router(Options(policy=POLICIES[policy], speed=speed))
    for name in "abcdefgh"[:workers]:
        made.add_worker(WorkerId(name))
        made.set_ready(WorkerId(name), True)
        made.set_engine(WorkerId(name), engine or Engine(BLOCK, 10_000))
    return made


def text(seed: int, tokens: int = 900) -> list[int]:
    """A text of its own: no two share a beginning."""
    return [seed * 10_000 + i for i in range(tokens)]


def ask(ids: list[int], stream: bool = True, **more: object) -> Request:
    return Request(Prompt(token_bytes(ids), True), stream=stream, **more)  # type: ignore[arg-type]


def answered(prompt_tokens: int, completion_tokens: int = 1) -> Result:
    return Result(Usage(prompt_tokens, completion_tokens, None))


def serve(made: Router, ids: list[int], now: float, result: Result | None = None) -> Reservation:
    """One request whose prefill takes as long as estimated and whose answer is short."""
    held = made.admit(ask(ids), now)
    made.prefilled(held, held.prefill_end)
    made.settle(held, result or answered(len(ids)), held.prefill_end)
    return held


# --- placement, end to end


def test_a_seen_prefix_returns_to_its_worker() -> None:
    made = router()
    homes = {seed: serve(made, text(seed), seed * 2.0).worker_id for seed in range(8)}
    for turn, seed in enumerate(random.Random(1).sample(range(8), 8)):
        held = serve(made, text(seed) + text(100 + seed, 40), 50.0 + 2 * turn)
        assert held.worker_id == homes[seed]
        assert held.cached_tokens >= 900 // BLOCK * BLOCK


def test_an_unseen_prompt_goes_to_the_least_work() -> None:
    made = router(workers=3)
    first = made.admit(ask(text(1, 4000)), 0.0)
    second = made.admit(ask(text(2, 1000)), 0.0)
    assert {first.worker_id, second.worker_id} == {A, B}
    assert made.admit(ask(text(3, 9000)), 0.0).worker_id == "c"
    assert made.admit(ask(text(4, 500)), 0.0).worker_id == second.worker_id


@pytest.mark.parametrize("policy", ["prefix_affinity", "least_work", "round_robin"])
def test_unseen_requests_one_after_another_take_turns(policy: str) -> None:
    made = router(policy)
    taken = [serve(made, text(seed), seed * 2.0).worker_id for seed in range(8)]
    assert taken == [A, B] * 4 or taken == [B, A] * 4


def test_equal_prompts_arriving_together_meet() -> None:
    made = router()
    held = [made.admit(ask(text(1)), 0.0) for _ in range(3)]
    assert len({r.worker_id for r in held}) == 1
    assert [r.cached_tokens for r in held] == [0, 896, 896]


@pytest.mark.parametrize("speed", [GPU_SPEED, CPU_SPEED], ids=["gpu", "cpu"])
def test_c07_a_burst_that_shares_a_prefix_is_spread_and_computes_it_once_each(speed: Speed) -> None:
    made = router(workers=4, speed=speed)
    shared = text(1, 4000)
    held = [made.admit(ask(shared + text(2 + i, 60)), 0.0) for i in range(64)]
    per_worker = Counter(r.worker_id for r in held)
    assert len(per_worker) == 4 and max(per_worker.values()) <= 1.3 * 16
    assert sum(r.cached_tokens == 0 for r in held) == 4
    assert {r.cached_tokens for r in held} == {0, 4000}


@pytest.mark.parametrize("speed", [GPU_SPEED, CPU_SPEED], ids=["gpu", "cpu"])
@pytest.mark.parametrize("seed", range(5))
def test_a_shuffled_burst_of_documents_is_computed_once_each(speed: Speed, seed: int) -> None:
    made = router(speed=speed)
    burst = [(document, question) for document in range(8) for question in range(4)]
    random.Random(seed).shuffle(burst)
    homes: dict[int, set[WorkerId]] = {}
    cached = prompt = 0
    for document, question in burst:
        held = made.admit(ask(text(document) + text(100 + question, 12), stream=False), 0.0)
        homes.setdefault(document, set()).add(held.worker_id)
        cached += held.cached_tokens
        prompt += 912
    assert cached / prompt >= 0.73, "0.75 is the most there can be"
    per_worker = Counter(home for (home,) in homes.values())
    assert max(per_worker.values()) <= 5


def test_a_seen_prefix_returns_though_its_worker_is_slower_than_was_believed() -> None:
    made = router()
    first = made.admit(ask(text(1)), 0.0)
    made.prefilled(first, 20 * first.prefill_end)
    made.settle(first, answered(900), 5.0)
    second = made.admit(ask(text(1) + text(2, 50)), 10.0)
    assert second.worker_id == first.worker_id, "nothing says that the other one is faster"


def test_a_hot_prefix_spills_when_that_is_cheaper() -> None:
    made = router()
    shared = text(1, 2000)
    held = []
    for i in range(100):
        held.append(made.admit(ask(shared + text(2 + i, 200)), 0.1 * i))
        made.prefilled(held[-1], held[-1].prefill_end)
    per_worker = Counter(r.worker_id for r in held)
    assert held[1].worker_id == held[0].worker_id
    assert set(per_worker) == {A, B}, "the other worker learns a prefix that is this hot"
    assert min(per_worker.values()) >= 40
    assert sum(r.cached_tokens == 0 for r in held) == 2, "each computes it once"


def test_affinity_holds_under_load_where_recomputing_would_delay_the_others() -> None:
    made = router()
    home = serve(made, text(1, 4000), 0.0).worker_id
    for i in range(6):
        made.admit(ask(text(2 + i, 1000)), 10.0)
    made.admit(ask(text(9, 9000)), 10.0, excluded={A, B} - {home})
    for i in range(4):
        assert made.admit(ask(text(1, 4000) + text(10 + i, 50)), 10.0).worker_id == home


def test_it_does_not_hold_where_recomputing_delays_nobody() -> None:
    made = router()
    home = serve(made, text(1, 4000), 0.0).worker_id
    for i in range(6):
        decoding = made.admit(ask(text(2 + i, 20)), 10.0, excluded={A, B} - {home})
        made.prefilled(decoding, 10.0)
    held = made.admit(ask(text(1, 4000)), 10.0)
    assert held.worker_id != home and held.cached_tokens == 0


def test_who_waits_with_the_same_prefix_does_not_guard_it() -> None:
    made = router(workers=4)
    shared = text(1, 4000)
    held = [made.admit(ask(shared + text(2 + i, 60)), 0.0) for i in range(64)]
    _, alike = made.compare(ask(shared + text(99)), list(made.workers.values()), 0.0)
    _, others = made.compare(ask(text(98)), list(made.workers.values()), 0.0)
    assert alike.waiting_mean == pytest.approx(0.25), "the one that found no copy"
    assert others.waiting_mean == 16
    for one in held:
        made.prefilled(one, 9.0)
        made.settle(one, answered(4060), 9.0)
    assert not any(worker.waiting_behind for worker in made.workers.values())


def test_round_robin_takes_turns_whatever_is_cached() -> None:
    made = router("round_robin", workers=3)
    taken = [made.admit(ask(text(1)), 0.0).worker_id for _ in range(6)]
    assert taken == ["a", "b", "c"] * 2


def test_least_work_does_not_return_to_the_cache() -> None:
    made = router("least_work")
    home = serve(made, text(1), 0.0).worker_id
    assert serve(made, text(1), 2.0).worker_id != home


def test_a_request_that_could_not_be_read_is_placed_by_load() -> None:
    made = router()
    made.admit(ask(text(1)), 0.0)
    busy = next(w.id for w in made.workers.values() if w.in_flight)
    held = made.admit(Request(None), 0.0)
    assert held.worker_id != busy
    assert (held.cached_tokens, held.uncached_tokens, held.chain.hashes) == (0, 1, ())
    made.settle(held, answered(500), 1.0)
    assert made.index.blocks(held.worker_id) == 0


def test_a_burst_is_placed_the_same_streamed_or_plain() -> None:
    prompts = [text(i % 9, 300 + 200 * (i % 4)) + text(50 + i, 40) for i in range(48)]

    def placed(stream: bool) -> list[tuple[str, int]]:
        made = router(workers=4)
        held = [made.admit(ask(p, stream), 0.001 * i) for i, p in enumerate(prompts)]
        return [(r.worker_id, r.cached_tokens) for r in held]

    assert placed(stream=True) == placed(stream=False)


def test_a_shadow_policy_is_asked_and_not_followed() -> None:
    made = Router(Options(policy=POLICIES["prefix_affinity"], shadow=POLICIES["round_robin"]))
    for name in (A, B):
        made.add_worker(name)
        made.set_ready(name, True)
    held = [serve(made, text(1), 2.0 * turn) for turn in range(4)]
    assert len({r.worker_id for r in held}) == 1
    assert [r.shadow.worker_id for r in held if r.shadow] == [A, B, A, B]
    home = held[0].worker_id
    cached = [r.cached_tokens if r.shadow and r.shadow.worker_id == home else 0 for r in held]
    assert [r.shadow.cached_tokens for r in held if r.shadow] == cached


# --- who may be chosen


def test_a_model_goes_where_it_is_served_and_else_to_whoever_judges() -> None:
    made = router(workers=3)
    for name in (A, B):
        made.set_models(name, frozenset(("m",)))
    made.set_models(WorkerId("c"), frozenset(("other",)))
    for i in range(6):
        assert made.admit(ask(text(i), model="m"), 0.0).worker_id in (A, B)
    assert made.admit(ask(text(7), model="other"), 0.0).worker_id == "c"
    assert made.admit(ask(text(8), model="nobody's"), 0.0).worker_id in made.workers


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_is_not_available_or_excluded_is_not_chosen(policy: str) -> None:
    made = router(policy, workers=4)
    made.set_ready(A, False, "starting")
    made.workers[B].draining = True
    for i in range(6):
        held = made.admit(ask(text(i)), 0.0, excluded={WorkerId("c")})
        assert held.worker_id == "d"


def test_no_worker_says_why_for_each() -> None:
    made = router(workers=2)
    made.set_ready(A, False, "connection refused")
    with pytest.raises(NoWorker) as raised:
        made.admit(ask(text(1)), 0.0, excluded={B})
    assert raised.value.reasons == {A: "connection refused", B: "excluded"}
    with pytest.raises(NoWorker) as raised:
        Router(Options(policy=POLICIES["round_robin"])).admit(ask(text(1)), 0.0)
    assert raised.value.reasons == {}


def test_nothing_is_reserved_or_stored_where_no_worker_is() -> None:
    made = router()
    made.set_ready(A, False)
    with pytest.raises(NoWorker):
        made.admit(ask(text(1)), 0.0, excluded={B})
    assert [w.in_flight for w in made.workers.values()] == [0, 0]
    assert made.index.blocks(A) == made.index.blocks(B) == 0


# --- the life of a request


def test_settle_gives_back_exactly_once() -> None:
    made = router()
    held = made.admit(ask(text(1)), 0.0)
    made.settle(held, answered(900), 1.0)
    with pytest.raises(ValueError, match="exactly once"):
        made.settle(held, answered(900), 1.0)
    assert made.workers[held.worker_id].in_flight == 0


def test_what_was_generated_is_expected_in_the_cache_by_the_next_turn() -> None:
    made = router()
    first = serve(made, text(1, 338), 0.0, answered(338, 150))
    second = made.admit(ask(text(1, 338) + text(2, 300)), 5.0)
    assert second.worker_id == first.worker_id
    assert second.cached_tokens == (338 + 150 - 1) // BLOCK * BLOCK == 480


def test_without_usage_nothing_is_learned_of_the_answer() -> None:
    made = router()
    serve(made, text(1, 338), 0.0, Result(None))
    assert made.admit(ask(text(1, 338) + text(2, 300)), 5.0).cached_tokens == 336
    assert [w.estimates.decode.output_tokens for w in made.workers.values()] == [128, 128]


def test_a_new_generation_has_nothing_cached() -> None:
    made = router(workers=1)
    serve(made, text(1), 0.0)
    running = made.admit(ask(text(2)), 5.0)
    made.new_generation(A, Loss.STARTED)
    assert made.index.blocks(A) == 0
    assert made.workers[A].in_flight == 1, "what runs stays reserved until it settles"
    made.settle(running, answered(900, 500), 6.0)
    assert made.workers[A].in_flight == 0
    assert made.admit(ask(text(2)), 7.0).cached_tokens == 0, "the old process had computed it"


def delivered(ids: list[int], cached_tokens: int) -> Result:
    return Result(Usage(len(ids), 1, cached_tokens))


def test_c18_a_cache_that_was_reset_unseen_is_a_new_generation() -> None:
    made = router(workers=1)
    for seed in range(6):
        serve(made, text(seed), seed, delivered(text(seed), 0))
    lost = []
    for seed in range(4):
        held = made.admit(ask(text(seed)), 10.0 + seed)
        made.prefilled(held, held.prefill_end)
        lost.append(made.settle(held, delivered(text(seed), 0), 11.0 + seed))
    assert lost == [False, False, True, False]
    assert made.workers[A].losses == {Loss.OVER_PREDICTED: 1}
    assert made.admit(ask(text(5)), 20.0).cached_tokens == 0, "it was there before"
    assert made.admit(ask(text(1)), 20.0).cached_tokens == 896, "it was computed since"


def test_an_engine_that_caches_less_than_it_says_is_believed_to_hold_less() -> None:
    """100 of 400 blocks are the cache; 8 prompts of 56 blocks take turns, so that none is found."""
    made = router(workers=1, engine=Engine(BLOCK, 400))
    predicted = []
    for turn in range(200):
        ids = text(turn % 8)
        held = made.admit(ask(ids), 2.0 * turn)
        predicted.append(held.cached_tokens)
        made.prefilled(held, held.prefill_end)
        made.settle(held, delivered(ids, 0), held.prefill_end)
    assert made.workers[A].losses == {}
    assert sum(predicted[-40:]) < sum(predicted[8:48]) / 2


def test_a_prompt_left_before_it_was_computed_is_not_there() -> None:
    made = router(workers=1)
    held = made.admit(ask(text(1)), 0.0)
    made.settle(held, NOT_COMPUTED, 0.1)
    assert made.admit(ask(text(1)), 1.0).cached_tokens == 0


def test_a_request_of_an_earlier_generation_takes_nothing_from_the_new_one() -> None:
    made = router(workers=1)
    old = made.admit(ask(text(1)), 0.0)
    made.new_generation(A, Loss.STARTED)
    new = made.admit(ask(text(1)), 1.0)
    made.settle(old, NOT_COMPUTED, 2.0)
    assert made.admit(ask(text(1)), 3.0).cached_tokens == 896
    made.settle(new, answered(900), 4.0)


def test_an_answer_of_an_earlier_generation_leaves_no_credit_in_the_new_one() -> None:
    made = router(workers=1)
    old = made.admit(ask(text(1)), 0.0)
    made.new_generation(A, Loss.STARTED)
    made.admit(ask(text(1)), 1.0)
    made.settle(old, answered(900, 500), 2.0)
    assert made.admit(ask(text(1) + text(2)), 3.0).cached_tokens == 896


def test_a_prompt_that_was_never_computed_is_forgotten() -> None:
    made = router(workers=1)
    serve(made, text(1), 0.0)
    refused = made.admit(ask(text(1) + text(2, 300)), 5.0)
    assert refused.cached_tokens == 896
    made.settle(refused, NOT_COMPUTED, 6.0)
    assert made.admit(ask(text(1) + text(2, 300)), 7.0).cached_tokens == 896


def test_a_refusal_leaves_what_was_held_before() -> None:
    made = router(workers=1)
    serve(made, text(1, 4 * BLOCK), 0.0)
    refused = made.admit(ask(text(1, 4 * BLOCK)), 5.0)
    assert refused.cached_tokens == 3 * BLOCK, "the last token is always computed"
    made.settle(refused, NOT_COMPUTED, 6.0)
    assert made.admit(ask(text(1, 400)), 7.0).cached_tokens == 4 * BLOCK


def test_a_prompt_is_charged_what_is_not_cached() -> None:
    made = router(workers=1)
    serve(made, text(1), 0.0)
    fit = made.workers[A].estimates.prefill
    held = made.admit(ask(text(1) + text(2, 100)), 5.0)
    assert (held.cached_tokens, held.uncached_tokens) == (896, 104)
    assert held.prefill_seconds == fit.seconds(104, 896)


def test_max_tokens_bounds_what_is_reserved_for_decode() -> None:
    made = router(workers=1)
    rate = GPU_SPEED.decode_seconds_per_token
    assert made.admit(ask(text(1), max_tokens=5), 0.0).decode_seconds == pytest.approx(5 * rate)
    assert made.admit(ask(text(2)), 0.0).decode_seconds == pytest.approx(128 * rate)


def test_the_decode_rate_is_shared_time_of_streams() -> None:
    made = router(workers=1)
    first, second = made.admit(ask(text(1)), 0.0), made.admit(ask(text(2)), 0.0)
    plain = made.admit(ask(text(3), stream=False), 0.0)
    for held in (first, second):
        made.prefilled(held, 1.0)
    decode = made.workers[A].estimates.decode
    before = decode.seconds_per_token
    made.settle(first, answered(900, 100), 11.0)  # 10 s by three for 100 tokens
    assert decode.seconds_per_token == pytest.approx(before + (10 / 3 / 100 - before) * 0.05)
    learned = decode.seconds_per_token
    made.settle(plain, answered(900, 100), 11.0)
    assert decode.seconds_per_token == learned


def test_like_workers_share_what_is_known_of_their_speed() -> None:
    made = router(workers=3)
    for name in (A, B):
        made.set_models(name, frozenset(("m",)))
    made.set_models(WorkerId("c"), frozenset(("other",)))
    a, b, c = (w.estimates for w in made.workers.values())
    assert a is b
    assert a is not c
    for turn in range(4):
        held = made.admit(ask(text(turn), model="m"), 100.0 * turn)
        made.prefilled(held, 100.0 * turn + 10.0)
    assert b.prefill.seconds(900, 0) > 3 * GPU_SPEED.prefill.seconds(900, 0)
    assert c.prefill.seconds(900, 0) == GPU_SPEED.prefill.seconds(900, 0)


def test_like_workers_that_compute_at_the_same_time_are_not_one_fast_worker() -> None:
    made = router("round_robin")
    truth = GPU_SPEED.prefill.seconds(900, 0)
    for turn in range(200):
        now = turn * 10.0
        held = [made.admit(ask(text(2 * turn + i)), now) for i in range(2)]
        for i, each in enumerate(held):
            made.prefilled(each, now + truth * (1 + 0.01 * i))
            made.settle(each, answered(900), now + 1.0)
    assert made.workers[A].estimates.prefill.seconds(900, 0) == pytest.approx(truth, rel=0.2)


def test_an_index_is_bounded_by_the_engine_s_blocks() -> None:
    made = router(workers=1, engine=Engine(BLOCK, 50))
    for seed in range(10):
        serve(made, text(seed), seed * 2.0)
        assert made.index.blocks(A) == 50


def test_unknown_capacity_has_a_default() -> None:
    made = Router(Options(policy=POLICIES["least_work"], default_capacity_blocks=7))
    made.add_worker(A)
    made.set_ready(A, True)
    serve(made, text(1), 0.0)
    assert made.index.blocks(A) == 7
