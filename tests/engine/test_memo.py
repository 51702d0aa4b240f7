"""Joining the ids of pieces gives the ids of the whole, on the model's real tokenizer."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.blocks import token_bytes
from gateway.prompt import memo
from gateway.prompt.batches import Batches
from gateway.prompt.tokenizer import ModelTokenizer, load_tokenizer
from gateway.prompt.verify import TEXTS
from tests.up_process import MODEL

TOKENIZER: ModelTokenizer = load_tokenizer(MODEL, None)

SNIPPETS = (
    "The quick brown fox jumps over the lazy dog. It's 3 o'clock, isn't it? We'll see",
    " Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich",
    " Портной гуляет по городу, а кошка спит на окне",  # noqa: RUF001
    "日本語のテキストです。 これは 二つ目の文 です",
    " العربية نص تجريبي طويل بعض الشيء",
    "🙂🏽 👩‍👩‍👧‍👦 emoji  in\ttext ",
    "def f(x):\n    return [i ** 2 for i in range(x) if i % 2]\n\n\nclass A(B): pass\r\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_sta rt|> a <|im_end|> b",
    "   leading and trailing   ",
    "1234567890 3.14159 0xdeadbeef a1 b2 c3",
    "e\u0301 cafe\u0301 nai\u0308ve \u00a0 non breaking",
    "CamelCaseWords snake_case_words kebab-case-words https://example.org/a b?c=d",
)

texts = st.lists(
    st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=30)), min_size=1, max_size=12
).map("".join)


def test_the_tokenizer_holds() -> None:
    assert memo.holds(TOKENIZER, [*TEXTS.values(), *SNIPPETS])


@pytest.fixture(autouse=True, scope="module")
def _short_pieces() -> object:
    patch = pytest.MonkeyPatch()
    patch.setattr(memo, "PIECE_CHARS", 16)
    yield
    patch.undo()


@settings(max_examples=300, deadline=None)
@given(texts)
def test_pieces_are_the_text_and_their_ids_its_ids(text: str) -> None:
    cut = memo.pieces(text)
    assert "".join(cut) == text
    joined = [i for piece in cut for i in TOKENIZER.encode(piece, False)]
    assert joined == TOKENIZER.encode(text, False)


def test_a_burst_is_tokenised_once_and_a_leaver_takes_nothing_away() -> None:
    document = " ".join(SNIPPETS[0] for _ in range(40))

    async def main() -> None:
        batches = Batches()
        remembered = memo.Memo(TOKENIZER, batches, 1 << 20)
        asked = [
            asyncio.create_task(remembered.encode(f"{document} question {n}", n % 2 == 0))
            for n in range(8)
        ]
        await asyncio.sleep(0)
        asked[0].cancel()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError)
        for n, ids in list(enumerate(answers))[1:]:
            whole = TOKENIZER.encode(f"{document} question {n}", n % 2 == 0)
            assert ids == token_bytes(whole)
        batches.close()

    asyncio.run(main())


def test_the_memo_is_bounded() -> None:
    async def main() -> None:
        batches = Batches()
        remembered = memo.Memo(TOKENIZER, batches, 2_000)
        for n in range(50):
            text = f"{n} " + SNIPPETS[0] * 3
            assert await remembered.encode(text, False) == token_bytes(
                TOKENIZER.encode(text, False)
            )
            assert remembered.held_bytes <= 2_000
        batches.close()

    asyncio.run(main())
