from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.blocks import token_bytes
from gateway.prompt.conversation import read_conversation
from gateway.prompt.reader import ExactModel, Prompts, Reading
from gateway.prompt.tokenizer import ModelTokenizer, load_tokenizer
from gateway.prompt.trust import Kind, Trust
from tests.unit.prompt.tiny import BOS, TEMPLATE, model_folder

USER = {"role": "user", "content": "Hi"}
LONG = "A text that is not tokenised on the event loop. " * 100


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    folder: Path = tmp_path_factory.mktemp("model")
    return load_tokenizer(model_folder(folder, chat_template=TEMPLATE), None)


@pytest.fixture(scope="module")
def prompts(local: ModelTokenizer) -> Iterator[Prompts]:
    made = reading_with(local)
    yield made
    made.close()


def reading_with(local: ModelTokenizer, **more: Any) -> Prompts:
    made = Prompts()
    made.is_base("m")
    made.use_exact("m", ExactModel(local, Trust(), **more))
    return made


def read(prompts: Prompts, endpoint: str, **fields: Any) -> Reading:
    return asyncio.run(prompts.read(endpoint, fields))


def exact(prompts: Prompts, endpoint: str, **fields: Any) -> bytes:
    reading = read(prompts, endpoint, model="m", **fields)
    assert reading.fallback is None and reading.kind is not None
    prompt = reading.prompt
    assert prompt is not None and prompt.exact
    return prompt.data


def unread(prompts: Prompts, endpoint: str, reason: str, **fields: Any) -> bytes:
    """The bytes of a prompt whose tokens are not known, for that reason."""
    reading = read(prompts, endpoint, **{"model": "m", **fields})
    assert reading.fallback == reason
    assert (reading.kind, reading.tokens) == (None, None)
    prompt = reading.prompt
    assert prompt is not None and not prompt.exact
    return prompt.data


def rendered(local: ModelTokenizer, **fields: Any) -> bytes:
    conversation = read_conversation(fields, False)
    return token_bytes(local.encode(local.render(conversation), conversation.special))


# --- exact


def test_a_conversation_s_tokens_are_the_template_s(
    prompts: Prompts, local: ModelTokenizer
) -> None:
    messages = [USER, {"role": "assistant", "content": "Yo", "name": "x"}, USER]
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    assert exact(prompts, "chat", messages=messages, add_generation_prompt=False) == (
        token_bytes(local.encode(text, False))
    )
    text += "<|im_start|>assistant\n"
    assert exact(prompts, "chat", messages=messages) == token_bytes(local.encode(text, False))


def test_a_text_s_tokens_have_the_special_ones_unless_told(
    prompts: Prompts, local: ModelTokenizer
) -> None:
    assert exact(prompts, "completions", prompt="Hi") == token_bytes(local.encode("Hi", True))
    assert exact(prompts, "completions", prompt="") == token_bytes([BOS])
    bare = exact(prompts, "completions", prompt="Hi", add_special_tokens=False)
    assert bare == token_bytes(local.encode("Hi", False))


def test_of_several_texts_the_first_counts(prompts: Prompts, local: ModelTokenizer) -> None:
    assert exact(prompts, "completions", prompt=["Hi", "Yo"]) == token_bytes(
        local.encode("Hi", True)
    )


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]], [[1, 2, 3], [4]]])
def test_token_ids_need_no_tokenizer(prompts: Prompts, prompt: Any) -> None:
    for model in ("m", "unknown", None, 5):
        found = read(prompts, "completions", model=model, prompt=prompt)
        assert found.prompt is not None and found.prompt.exact and found.fallback is None
        assert found.prompt.data == token_bytes([1, 2, 3])


def test_a_long_text_is_read_in_a_thread_and_alike(prompts: Prompts, local: ModelTokenizer) -> None:
    seen: list[str] = []

    class Watched(ModelTokenizer):
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            seen.append(threading.current_thread().name)
            return local.encode(text, add_special_tokens)

        def encode_all(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
            seen.append(threading.current_thread().name)
            return local.encode_all(texts, add_special_tokens)

    watched = reading_with(Watched(local.tokenizer, local.template))
    assert exact(watched, "completions", prompt="Hi")
    assert exact(watched, "completions", prompt=LONG) == token_bytes(local.encode(LONG, True))
    watched.close()
    assert seen[0] == threading.current_thread().name
    assert seen[1].startswith("tokenize")


def test_a_long_text_is_read_by_its_pieces_and_alike(local: ModelTokenizer) -> None:
    made = reading_with(local, by_pieces=True)
    for text in (LONG, LONG + LONG, LONG + "More?"):
        assert exact(made, "completions", prompt=text) == token_bytes(local.encode(text, True))
        messages = [{"role": "user", "content": text}]
        assert exact(made, "chat", messages=messages) == rendered(local, messages=messages)
    made.close()


# --- not exact, and why


@pytest.mark.parametrize("model", ["other", None, 5, "", ["m"]])
def test_a_model_that_is_not_known_is_read_as_bytes(prompts: Prompts, model: object) -> None:
    assert unread(prompts, "completions", "no_tokenizer", model=model, prompt="Hi é") == (
        "Hi é".encode()
    )
    assert unread(prompts, "chat", "no_tokenizer", model=model, messages=[USER])


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "custom", "function": {"name": "f"}}]},
        {"tools": [{"function": {"name": 5}}]},
        {"tools": [{"function": {"name": "f", "parameters": "x"}}]},
        {"tools": [{"function": {"name": "f", "strict": "yes"}}]},
        {"tools": [{"function": {"name": "f"}, "defer_loading": 1}]},
        {"tools": "x"},
        {"tools": [None]},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template_kwargs": {"tools": []}},
        {"chat_template_kwargs": 5},
        {"continue_final_message": True},
        {"documents": "x"},
        {"documents": ["x"]},
        {"truncate_prompt_tokens": 0},
        {"reasoning_effort": 5},
        {"mm_processor_kwargs": {"a": 1}},
        {"kv_transfer_params": {"prompt_token_ids": [1]}},
    ],
)
def test_options_that_change_a_conversation_s_text(prompts: Prompts, more: dict[str, Any]) -> None:
    assert unread(prompts, "chat", "option", messages=[USER], **more)


@pytest.mark.parametrize(
    "more", [{"truncate_prompt_tokens": 5}, {"suffix": "x"}, {"prompt_embeds": "eA=="}]
)
def test_options_that_change_a_text(prompts: Prompts, more: dict[str, Any]) -> None:
    assert unread(prompts, "completions", "option", prompt="Hi", **more) == b"Hi"
    assert unread(prompts, "completions", "option", prompt=[1, 2], **more)


@pytest.mark.parametrize(
    "more",
    [
        {"tools": None},
        {"temperature": 0, "n": 2, "best_of": 2, "echo": True},
        {"functions": [{"name": "f"}], "response_format": {"type": "text"}},
        {"kv_transfer_params": {"do_remote_decode": True}},
        {"chat_template_kwargs": None, "documents": None, "reasoning_effort": None},
    ],
)
def test_options_that_change_nothing(prompts: Prompts, more: dict[str, Any]) -> None:
    assert exact(prompts, "chat", messages=[USER], **more) == exact(
        prompts, "chat", messages=[USER]
    )


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]},
        {"role": "user", "content": [None]},
        {"role": "user", "content": [{"text": "Hi"}]},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        {"role": "user", "content": 5},
        {"content": "Hi"},
        {"role": 5, "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
        {"role": "assistant", "content": "", "tool_calls": {"id": "1"}},
        {"role": "assistant", "content": "", "reasoning": 5},
        "Hi",
        None,
        [],
    ],
)
def test_messages_that_are_more_than_text(prompts: Prompts, message: Any) -> None:
    assert unread(prompts, "chat", "not_text", messages=[USER, message])


@pytest.mark.parametrize(
    "prompt",
    [[-1], [1 << 32], [1, "a"], [1, None], [[]], [["a"]], {"a": 1}, 5, [5.5], [None, "a"]],
)
def test_prompts_that_are_neither_text_nor_token_ids(prompts: Prompts, prompt: Any) -> None:
    assert unread(prompts, "completions", "not_text", prompt=prompt)


def test_a_conversation_that_the_template_refuses(local: ModelTokenizer, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "r", chat_template="{{ raise_exception('no') }}")
    made = reading_with(load_tokenizer(folder, None))
    assert unread(made, "chat", "template", messages=[USER])
    made.close()


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("chat", {}),
        ("chat", {"messages": []}),
        ("chat", {"messages": None}),
        ("messages", {"messages": []}),
        ("responses", {}),
        ("responses", {"input": []}),
        ("completions", {}),
        ("completions", {"prompt": None}),
        ("completions", {"prompt": []}),
    ],
)
def test_no_prompt_is_none(prompts: Prompts, endpoint: str, fields: dict[str, Any]) -> None:
    for model in ("m", "other"):
        found = read(prompts, endpoint, model=model, **fields)
        assert (found.prompt, found.fallback) == (None, "no_prompt")


# --- what bytes are for


def shared(one: bytes, other: bytes) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def test_bytes_share_a_beginning_as_far_as_conversations_do(prompts: Prompts) -> None:
    turns = [{"role": "user", "content": f"turn {i} " * 20} for i in range(3)]
    first = unread(prompts, "chat", "no_tokenizer", model="o", messages=turns[:2])
    more = unread(prompts, "chat", "no_tokenizer", model="o", messages=turns)
    other = unread(prompts, "chat", "no_tokenizer", model="o", messages=[turns[2]])
    assert shared(first, more) >= len(first) - 2
    assert shared(other, more) < 60


def test_tools_come_before_the_messages(prompts: Prompts) -> None:
    tools = [{"type": "function", "function": {"name": "a_long_name" * 20}}]
    asked = [{"model": "o", "messages": [{**USER, "content": c}], "tools": tools} for c in "ab"]
    one, other = (unread(prompts, "chat", "no_tokenizer", **fields) for fields in asked)
    assert shared(one, other) > 200


def hashes(prompts: Prompts, **fields: Any) -> set[int]:
    found = read(prompts, "completions", **{"model": "m", "prompt": [1] * 64, **fields})
    assert found.prompt is not None
    return set(found.prompt.chain(16).hashes)


def test_what_has_a_cache_of_its_own_is_kept_apart(prompts: Prompts) -> None:
    base = hashes(prompts)
    assert hashes(prompts, temperature=1) == base
    for other in ({"model": "adapter"}, {"cache_salt": "x"}, {"cache_salt": "y"}):
        assert base.isdisjoint(hashes(prompts, **other))
    assert hashes(prompts, cache_salt="x").isdisjoint(hashes(prompts, cache_salt="y"))
    assert hashes(prompts, model=None) == hashes(prompts, model=5) == base
    adapter = hashes(prompts, model="adapter", cache_salt="x")
    assert adapter.isdisjoint(hashes(prompts, model="adapter") | hashes(prompts, cache_salt="x"))
    assert hashes(prompts, cache_salt="") == hashes(prompts, cache_salt=None) == base


def test_names_of_one_base_model_share_a_chain(prompts: Prompts) -> None:
    assert hashes(prompts, model="alias").isdisjoint(hashes(prompts))
    prompts.is_base("alias")
    assert hashes(prompts, model="alias") == hashes(prompts)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}


def test_a_picture_is_its_digest_at_its_place(prompts: Prompts) -> None:
    def asked(picture: object, question: str) -> bytes:
        parts = [
            {"type": "text", "text": "before " * 50},
            picture,
            {"type": "text", "text": question},
        ]
        return unread(prompts, "chat", "not_text", messages=[{**USER, "content": parts}])

    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "B" * 100_000}}
    one = asked(IMAGE, "What is it?")
    assert len(one) < 700
    assert 350 < shared(one, asked(other, "What is it?")) < shared(one, asked(IMAGE, "Why?"))


# --- what the engine said of it


def test_tokens_of_all_prompts_are_counted(prompts: Prompts, local: ModelTokenizer) -> None:
    def tokens(prompt: Any) -> int | None:
        return read(prompts, "completions", model="m", prompt=prompt).tokens

    assert tokens("Hi") == 3
    assert tokens(["Hi", "Hello"]) == 3 + 6
    assert tokens([1, 2, 3]) == 3
    assert tokens([[1, 2, 3], [4], []]) == 4
    assert tokens(["Hi", "x" * 70_000]) is None
    chat = read(prompts, "chat", model="m", messages=[USER])
    assert chat.tokens == len(rendered(local, messages=[USER])) // 4


def test_a_kind_that_the_engine_counts_otherwise_is_read_as_bytes(
    local: ModelTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    made = reading_with(local)
    named = [{**USER, "content": [{"type": "text", "text": "secret"}]}]
    reading = read(made, "chat", model="m", messages=named)
    assert reading.kind == Kind("chat", frozenset(("parts",)))
    made.answered(reading, 1)
    assert unread(made, "chat", "mismatch", messages=named)
    assert exact(made, "chat", messages=[USER]) and exact(made, "completions", prompt="Hi")
    assert "chat+parts" in caplog.text and "secret" not in caplog.text
    made.answered(read(made, "completions", model="m", prompt="Hi"), 7)
    assert unread(made, "completions", "mismatch", prompt="Hi")
    assert unread(made, "chat", "mismatch", messages=[USER])
    assert made.exact_names() == []
    made.close()


def test_the_next_request_is_kept_when_one_is_asked_for(prompts: Prompts) -> None:
    assert prompts.take_sample("m") is None
    read(prompts, "completions", model="m", prompt=[1, 2])
    read(prompts, "responses", model="m", input="no /tokenize reads it so")
    read(prompts, "chat", model="other", messages=[USER])
    read(prompts, "chat", model="m", messages=[USER])
    read(prompts, "completions", model="m", prompt="a later one")
    sample = prompts.take_sample("m")
    assert sample is not None and sample.fields["messages"] == [USER]
    assert sample.ids == exact(prompts, "chat", messages=[USER])


# --- whatever comes

LEAVES = st.none() | st.booleans() | st.integers(-5, 1 << 33) | st.floats() | st.text(max_size=5)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(("role", "content", "text", "type", "name", "input", "x")),
            inner | st.sampled_from(("user", "assistant", "text", "tool_result", "function")),
            max_size=4,
        )
    ),
    max_leaves=10,
)
FIELDS = st.dictionaries(
    st.sampled_from(
        (
            "messages",
            "prompt",
            "input",
            "system",
            "tools",
            "model",
            "cache_salt",
            "suffix",
            "add_special_tokens",
            "instructions",
            "documents",
            "chat_template_kwargs",
            "thinking",
        )
    ),
    JSON | st.just("m") | st.just([USER]),
)


@given(st.sampled_from(("chat", "completions", "messages", "responses")), FIELDS)
def test_no_request_is_an_error(prompts: Prompts, endpoint: str, fields: dict[str, Any]) -> None:
    fields = orjson.loads(orjson.dumps(fields))
    found = read(prompts, endpoint, **{"model": "m", **fields})
    prompt = found.prompt
    assert (found.fallback is None) == (prompt is not None and prompt.exact)
    if prompt is not None:
        assert prompt.chain(16).usable_blocks >= 0


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("depth", [100, 253, 254, 255, 400, 1000])
def test_deep_nesting_is_no_error(prompts: Prompts, endpoint: str, depth: int) -> None:
    nested = b"[" * depth + b"1" + b"]" * depth
    key = b"messages" if endpoint == "chat" else b"prompt"
    fields = orjson.loads(b'{"%b": %b}' % (key, nested))
    read(prompts, endpoint, **{"model": "m", **fields})
    read(prompts, endpoint, **{"model": "other", **fields})


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.floats(allow_nan=False),
    st.sampled_from(("", "x", "text", "image_url", "function", "tool_use", "tool_result", "none")),
)  # fmt: skip
KEYS = st.sampled_from((
    "role", "content", "type", "text", "image_url", "tool_calls", "function", "name", "id",
    "arguments", "input", "output", "call_id", "source", "summary", "thinking", "parameters",
))  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)
PARTS = st.lists(
    st.fixed_dictionaries({"type": VALUES}, optional={"text": VALUES, "content": VALUES}),
    min_size=1,
    max_size=3,
)
CONTENTS = st.one_of(VALUES, PARTS)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(("user", "assistant", "system", "tool")), "content": CONTENTS},
        optional={"tool_calls": VALUES, "name": VALUES},
    ),
    min_size=1,
    max_size=3,
)
ODD_FIELDS = st.sampled_from((
    "tools", "system", "instructions", "tool_choice", "documents", "chat_template_kwargs",
    "reasoning", "reasoning_effort", "thinking", "cache_salt", "previous_response_id",
))  # fmt: skip


@settings(max_examples=400)
@given(
    st.sampled_from(("chat", "completions", "messages", "responses")),
    st.one_of(MESSAGES, VALUES),
    st.dictionaries(ODD_FIELDS, VALUES, max_size=3),
)
def test_c30_no_body_whatever_it_is_fails_to_be_read(
    prompts: Prompts, endpoint: str, said: Any, odd: dict[str, Any]
) -> None:
    name = {"completions": "prompt", "responses": "input"}.get(endpoint, "messages")
    reading = read(prompts, endpoint, model="m", **odd, **{name: said})
    assert (reading.fallback is None) == (reading.kind is not None)


def test_c30_a_part_too_deep_to_be_written_is_placed_by_load(prompts: Prompts) -> None:
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    part = {"type": "image_url", "image_url": deep}
    for endpoint in ("chat", "messages"):
        reading = read(prompts, endpoint, model="m", messages=[{"role": "user", "content": [part]}])
        assert (reading.prompt, reading.fallback) == (None, "no_prompt")
