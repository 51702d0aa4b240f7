from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.blocks import BYTE_BLOCK_BYTES, Prompt, token_bytes
from gateway.core.held_blocks import Stored
from gateway.core.prefix_index import PrefixIndex
from gateway.core.reservation import WorkerId
from tests.unit.core.naive_index import Key, NaiveLru

A, B = WorkerId("a"), WorkerId("b")
SIZE = 2
PROMPTS = st.builds(
    lambda ids: Prompt(token_bytes(ids), True), st.lists(st.integers(0, 1), max_size=13)
)
STEPS = st.one_of(
    st.tuples(st.just("store"), PROMPTS, st.integers(0, 8)),
    st.tuples(st.just("forget"), st.none(), st.integers(0, 9)),
    st.tuples(st.just("answered"), PROMPTS, st.integers(0, 14)),
    st.tuples(st.just("drop"), st.none(), st.none()),
    st.tuples(st.just("drop_before"), st.none(), st.integers(0, 9)),
)


def tokens(*ids: int) -> Prompt:
    return Prompt(token_bytes(ids), True)


def index_of(*workers: WorkerId, max_blocks: int = 1000) -> PrefixIndex:
    index = PrefixIndex(max_blocks)
    for worker in workers:
        index.add(worker)
    return index


def store(index: PrefixIndex, prompt: Prompt, capacity_blocks: int, worker: WorkerId = A) -> Stored:
    return index.store(worker, prompt.chain(SIZE), capacity_blocks * SIZE)


def match(index: PrefixIndex, prompt: Prompt, worker: WorkerId = A) -> int:
    return index.match(worker, prompt.chain(SIZE))


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from((A, B)), STEPS), max_size=25), st.lists(PROMPTS))
def test_it_is_a_least_recently_used_set_of_blocks_per_worker(steps, probes) -> None:
    cap = 6
    index = index_of(A, B, max_blocks=2 * cap)
    naive = {A: NaiveLru(), B: NaiveLru()}
    seen: list[Prompt] = list(probes)
    stored: dict[WorkerId, list[tuple[Stored, tuple[int, list[Key]]]]] = {A: [], B: []}
    for worker, (kind, prompt, number) in steps:
        model = naive[worker]
        if prompt is not None:
            seen.append(prompt)
        if kind == "store":
            here = store(index, prompt, number, worker)
            stored[worker].append((here, model.store(prompt, SIZE, number * SIZE, cap)))
        elif kind == "forget":
            for here, there in stored[worker][-1 - number : -number or None]:
                index.forget(worker, here)
                model.forget(*there)
        elif kind == "answered":
            index.answered(worker, prompt.chain(SIZE), 5 * SIZE, number)
            model.answered(prompt, SIZE, (5 * SIZE, cap), number)
        elif kind == "drop_before":
            for here, (touch, _) in stored[worker][-1 - number : -number or None]:
                index.drop_before(worker, here.use)
                model.drop_before(touch)
        else:
            index.drop(worker)
            model.drop()
        for each in (A, B):
            assert index.blocks(each) == len(naive[each].held)
            for probe in seen:
                assert match(index, probe, each) == naive[each].match(probe, SIZE)


def test_what_an_equal_prompt_has_touched_since_is_not_forgotten() -> None:
    index = index_of(A)
    prompt = tokens(*range(9))
    refused = store(index, prompt, 100)
    running = store(index, prompt, 100)
    index.forget(A, refused)
    assert match(index, prompt) == 4
    index.forget(A, running)
    assert match(index, prompt) == 4, "they were there when it came"


def test_evicted_blocks_are_counted_and_dropped_ones_are_not() -> None:
    index = index_of(A)
    store(index, tokens(*range(8)), 100)
    store(index, tokens(*range(50, 56)), 5)
    assert (index.evicted(A), index.blocks(A)) == (2, 5)
    index.drop(A)
    assert (index.evicted(A), index.blocks(A)) == (2, 0)


def test_the_tail_of_a_chain_is_evicted_first() -> None:
    index = index_of(A)
    long = tokens(*range(11))
    store(index, long, 5)
    assert match(index, long) == 5
    store(index, tokens(90, 91, 92, 93), 5)
    assert match(index, long) == 3, "the last two made room"
    store(index, tokens(*range(5)), 5)  # touches the first two of them
    store(index, tokens(94, 95), 5)
    assert match(index, long) == 2


def test_a_chain_longer_than_the_cache_leaves_its_beginning() -> None:
    index = index_of(A)
    store(index, tokens(*range(41)), 4)
    assert index.blocks(A) == 4
    assert match(index, tokens(*range(41))) == 4


def test_the_engine_computes_the_last_token_itself() -> None:
    index = index_of(A)
    store(index, tokens(*range(8)), 100)
    assert index.blocks(A) == 4
    assert match(index, tokens(*range(8))) == 3
    assert match(index, tokens(*range(9))) == 4


def test_an_answer_leaves_a_credit_behind_the_last_block() -> None:
    index = index_of(A)
    turn = tokens(*range(6))
    store(index, turn, 100)
    index.answered(A, turn.chain(SIZE), 200, 11)  # 6 + 6 - 1 tokens: 5 blocks
    assert match(index, tokens(*range(20))) == 5
    assert match(index, tokens(*range(10))) == 4, "never more than the prompt can use"
    assert match(index, tokens(*range(4), 70, 71, 72, 73)) == 2, "another continuation"
    store(index, tokens(*range(20)), 100)
    assert match(index, tokens(*range(20))) == 9


def test_a_credit_goes_with_its_block() -> None:
    index = index_of(A)
    turn = tokens(*range(6))
    store(index, turn, 100)
    index.answered(A, turn.chain(SIZE), 200, 11)
    store(index, tokens(*range(50, 54)), 4)  # evicts the third block
    store(index, turn, 100)
    assert match(index, tokens(*range(20))) == 3


def test_a_prompt_without_a_full_block_leaves_nothing() -> None:
    index = index_of(A)
    store(index, tokens(1), 100)
    index.answered(A, tokens(1).chain(SIZE), 200, 50)
    assert index.blocks(A) == 0
    assert match(index, tokens(1, 2, 3)) == 0


def test_workers_have_their_own_blocks() -> None:
    index = index_of(A, B)
    store(index, tokens(*range(9)), 100, A)
    assert (match(index, tokens(*range(9)), A), match(index, tokens(*range(9)), B)) == (4, 0)
    index.drop(A)
    assert index.blocks(A) == 0
    index.remove(A)
    index.add(A)
    assert match(index, tokens(*range(9)), A) == 0


def test_one_cap_bounds_the_whole_index() -> None:
    index = index_of(A, B, max_blocks=10)
    for start in range(0, 1000, 100):
        store(index, tokens(*range(start, start + 40)), 1000, A)
        store(index, tokens(*range(start, start + 40)), 1000, B)
        assert index.blocks(A) + index.blocks(B) <= 10


def test_the_cap_holds_when_a_worker_is_added_to_a_full_index() -> None:
    index = index_of(A, max_blocks=10)
    store(index, tokens(*range(40)), 1000, A)
    index.add(B)
    store(index, tokens(*range(40)), 1000, B)
    assert index.blocks(A) + index.blocks(B) <= 10


def test_a_prompt_read_as_bytes_makes_room_for_no_more_than_itself() -> None:
    index = index_of(A)
    capacity_tokens = 16 * 16
    ids = tokens(*range(capacity_tokens + 1))
    index.store(A, ids.chain(16), capacity_tokens)
    assert index.match(A, ids.chain(16)) == 16
    text = Prompt(b"x" * BYTE_BLOCK_BYTES, False).chain(16)
    index.store(A, text, capacity_tokens)
    assert index.match(A, ids.chain(16)) == 16 - text.block_tokens // 16
