"""Joining the ids of pieces gives the ids of the whole, on the model's real tokenizer."""

from __future__ import annotations

import asyncio
import re

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
    "人人生而自由, 在尊严和权利上一律平等. API 的 key 是 free",
    "모든 인간은 태어날 때부터 자유로우며 and equal in dignity 평등하다",
    " सभी मनुष्यों को गौरव और अधिकारों में a birth right है",
    "มนุษย์ทั้งหลายเกิดมามีอิสระ and equal กันในเกียรติศักดิ์",
    " Όλοι οι άνθρωποι γεννιούνται ελεύθεροι, ἐν ἀρχῇ ἦν ὁ λόγος",  # noqa: RUF001
    " כל בני האדם נולדו בני חורין and free ושווים",
    " Tous les êtres humains naissent libres; l'État, c'est moi, qu'il dit",
    " Iğdır'ın ılık ışığı İstanbul a kadar İNSAN haklarına",  # noqa: RUF001
    " SELECT a FROM b WHERE c = 'it''s' -- done\n\tif (x && y) { return f(a, b) || !c; }",
    "<s> </s> <unk> [INST] a [/INST] <|im_end| > <| im_end|> <|im_end|>a <|im_start|> b c",
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


@settings(max_examples=100, deadline=None)
@given(texts)
def test_any_seam_may_begin_a_piece(text: str) -> None:
    whole = TOKENIZER.encode(text, False)
    for seam in memo._SEAM.finditer(text):
        left, right = text[: seam.start()], text[seam.start() :]
        assert TOKENIZER.encode(left, False) + TOKENIZER.encode(right, False) == whole


@settings(max_examples=100, deadline=None)
@given(st.lists(texts, min_size=1, max_size=5), st.booleans())
def test_a_text_that_grows_has_the_ids_of_the_whole(turns: list[str], special: bool) -> None:
    async def main() -> None:
        batches = Batches()
        remembered = memo.Memo(TOKENIZER, batches, 1 << 20)
        for end in range(1, len(turns) + 1):
            text = "".join(turns[:end])
            expected = token_bytes(TOKENIZER.encode(text, special))
            assert await remembered.encode(text, special) == expected
        batches.close()

    asyncio.run(main())


@pytest.mark.parametrize("seam", [r"(?<=[a-z])(?=[a-z])", r"(?<= )(?=[A-Za-z])"])
def test_other_places_are_no_seams(monkeypatch: pytest.MonkeyPatch, seam: str) -> None:
    """A seeded fault: the properties above would see a piece that begins elsewhere."""
    monkeypatch.setattr(memo, "_SEAM", re.compile(seam))
    differ = 0
    for text in SNIPPETS:
        joined = [i for piece in memo.pieces(text) for i in TOKENIZER.encode(piece, False)]
        differ += joined != TOKENIZER.encode(text, False)
    assert differ
    assert not memo.holds(TOKENIZER, list(SNIPPETS))


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
