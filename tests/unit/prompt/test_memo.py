from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from gateway.core.blocks import token_bytes
from gateway.prompt.batches import Batches
from gateway.prompt.memo import PIECE_CHARS, Memo, holds, pieces
from gateway.prompt.tokenizer import ModelTokenizer, load_tokenizer
from gateway.prompt.verify import TEXTS
from tests.unit.loopback import run
from tests.unit.prompt.tiny import model_folder, tokenizer

PROSE = "It was a bright cold day in April and the clocks were striking thirteen, é 🙂 <s> \n\n"
WORDS = ("a", "word", "of", "é", "12", "<s>", "\n", "  ", "!", "🙂", "x" * 500)


def words(seed: int) -> str:
    chance = random.Random(seed)
    return " ".join(chance.choices(WORDS, k=chance.randrange(1500)))


LONG = st.integers(0, 10**6).map(words)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return load_tokenizer(model_folder(tmp_path_factory.mktemp("model")), None)


class Counted:
    """A tokenizer that keeps the texts it was given."""

    def __init__(self, local: ModelTokenizer) -> None:
        self.local = local
        self.around = local.around
        self.texts: list[str] = []

    def encode_all(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        self.texts += texts
        if any("fail" in text for text in texts):
            raise LookupError("cannot be encoded")
        return self.local.encode_all(texts, add_special_tokens)


@pytest.fixture
def batches() -> Iterator[Batches]:
    made = Batches()
    yield made
    made.close()


@pytest.fixture
def counted(local: ModelTokenizer) -> Counted:
    return Counted(local)


@pytest.fixture
def memo(counted: Counted, batches: Batches) -> Memo:
    return Memo(cast(ModelTokenizer, counted), batches, 1 << 20)


def whole(local: ModelTokenizer, text: str, special: bool = False) -> bytes:
    return token_bytes(local.encode(text, special))


# --- pieces


@given(st.one_of(st.text(), LONG))
def test_pieces_joined_are_the_text(text: str) -> None:
    cut = pieces(text)
    assert "".join(cut) == text
    assert all(len(piece) >= PIECE_CHARS for piece in cut[:-1])


@given(LONG, st.integers(0, 10_000), st.text(max_size=50))
def test_equal_beginnings_have_equal_first_pieces(text: str, length: int, tail: str) -> None:
    one, other = pieces(text), pieces(text[:length] + tail)
    shared = sum(1 for a, b in zip(one, other, strict=False) if a == b)
    begins = 0
    for piece in one:
        begins += len(piece)
        if begins + PIECE_CHARS > min(length, len(text)):
            break
        shared -= 1
    assert shared >= 0


@pytest.mark.parametrize("text", ["x" * 10_000, "é " * 5_000, "1 2 3 " * 2_000, "\n" * 5_000])
def test_text_without_seams_is_one_piece(text: str) -> None:
    assert pieces(text) == [text]


# --- whether a tokenizer may be used so


def test_a_tokenizer_of_words_holds(local: ModelTokenizer) -> None:
    assert holds(local, [*TEXTS.values(), PROSE])


@pytest.mark.parametrize("word", ["two words", "<a b>", "word", "x>", "<x"])
def test_a_special_token_that_a_seam_may_touch_does_not_hold(word: str) -> None:
    made = tokenizer()
    made.add_special_tokens([AddedToken(word, lstrip=True)])
    assert not holds(ModelTokenizer(made, None), [PROSE])


def across_spaces(letter: str) -> ModelTokenizer:
    """A tokenizer with a token of that letter and the space behind it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, f"{letter}Ġ"])}
    made = Tokenizer(models.BPE(vocabulary, [(letter, "Ġ")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return ModelTokenizer(made, None)


@pytest.mark.parametrize("letter", ["e", "s", "q"])
def test_a_tokenizer_that_looks_across_words_does_not_hold(letter: str) -> None:
    local = across_spaces(letter)
    text = f"a{letter} b"
    left, right = text[:2], text[2:]
    assert local.encode(text, False) != local.encode(left, False) + local.encode(right, False)
    assert not holds(local, list(TEXTS.values()))


# --- the memo


@settings(max_examples=40)
@given(LONG, st.booleans())
def test_ids_are_those_of_the_whole_text(local: ModelTokenizer, text: str, special: bool) -> None:
    async def main() -> None:
        batches = Batches()
        memo = Memo(local, batches, 1 << 20)
        expected = whole(local, text, special)
        assert await memo.encode(text, special) == expected
        assert await memo.encode(text, special) == expected
        assert await memo.encode(text + " more", special) == whole(local, text + " more", special)
        batches.close()

    run(main())


def test_only_new_text_is_tokenised(memo: Memo, counted: Counted, local: ModelTokenizer) -> None:
    document = PROSE * 100

    async def main() -> None:
        for question in ("What month?", "What time?"):
            text = document + question
            assert await memo.encode(text, False) == whole(local, text)
        again = document + "What month?"
        assert await memo.encode(again, False) == whole(local, again)

    run(main())
    first = pieces(document + "What month?")
    assert counted.texts == [*dict.fromkeys(first), pieces(document + "What time?")[-1]]


def test_a_burst_tokenises_its_common_text_once(
    memo: Memo, counted: Counted, local: ModelTokenizer
) -> None:
    texts = [PROSE * 100 + f"question {i}" for i in range(8)]

    async def main() -> list[bytes]:
        return await asyncio.gather(*(memo.encode(text, False) for text in texts))

    assert run(main()) == [whole(local, text) for text in texts]
    assert len(counted.texts) == len({piece for text in texts for piece in pieces(text)})


def test_who_leaves_takes_nothing_from_the_others(memo: Memo, local: ModelTokenizer) -> None:
    text = PROSE * 100

    async def main() -> None:
        leaves, stays = (asyncio.create_task(memo.encode(text, False)) for _ in range(2))
        await asyncio.sleep(0)
        leaves.cancel()
        assert await stays == whole(local, text)
        assert leaves.cancelled()
        assert await memo.encode(text, False) == whole(local, text)

    run(main())


def test_a_failure_is_told_and_not_kept(memo: Memo, local: ModelTokenizer) -> None:
    bad, good = "fail " + PROSE * 100, PROSE * 100

    async def main() -> None:
        for _ in range(2):
            with pytest.raises(LookupError):
                await memo.encode(bad, False)
        leaves = asyncio.create_task(memo.encode(bad, False))
        await asyncio.sleep(0)
        leaves.cancel()
        assert await memo.encode(good, False) == whole(local, good)

    run(main())


def test_what_is_kept_is_bounded(counted: Counted, batches: Batches, local: ModelTokenizer) -> None:
    memo = Memo(cast(ModelTokenizer, counted), batches, 40_000)

    async def main() -> None:
        for i in range(20):
            text = f"text {i} " + PROSE * 100
            assert await memo.encode(text, False) == whole(local, text)
            assert 0 < memo.held_bytes <= 40_000
        counted.texts.clear()
        last = "text 19 " + PROSE * 100
        assert await memo.encode(last, False) == whole(local, last)
        assert len(counted.texts) < len(pieces(last)), "the last text is the most recently used"

    run(main())


def test_a_piece_larger_than_the_memo_is_not_kept(batches: Batches, local: ModelTokenizer) -> None:
    memo = Memo(local, batches, 100)

    async def main() -> None:
        for _ in range(2):
            assert await memo.encode(PROSE * 100, True) == whole(local, PROSE * 100, True)
            assert memo.held_bytes == 0

    run(main())


def test_special_tokens_stand_before_and_behind(tmp_path: Path) -> None:
    local = load_tokenizer(model_folder(tmp_path), None)
    assert local.around() == (token_bytes([256]), b"")
