from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.blocks import Prompt, token_bytes
from gateway.prompt.reader import Prompts
from gateway.prompt.tokenizer import ModelTokenizer, load_tokenizer
from tests.unit.prompt.tiny import BOS, TEMPLATE, model_folder

USER = {"role": "user", "content": "Hi"}
LONG = "A text that is not tokenised on the event loop. " * 100


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    folder: Path = tmp_path_factory.mktemp("model")
    return load_tokenizer(model_folder(folder, chat_template=TEMPLATE), None)


@pytest.fixture(scope="module")
def prompts(local: ModelTokenizer) -> Iterator[Prompts]:
    made = Prompts()
    made.use_exact("m", local)
    yield made
    made.close()


def read(prompts: Prompts, endpoint: str, **fields: Any) -> tuple[Prompt | None, str | None]:
    return asyncio.run(prompts.read(endpoint, fields))


def exact(prompts: Prompts, endpoint: str, **fields: Any) -> bytes:
    prompt, reason = read(prompts, endpoint, model="m", **fields)
    assert prompt is not None and prompt.exact and reason is None
    return prompt.data


def unread(prompts: Prompts, endpoint: str, reason: str, **fields: Any) -> bytes:
    """The bytes of a prompt whose tokens are not known, for that reason."""
    prompt, why = read(prompts, endpoint, **{"model": "m", **fields})
    assert why == reason
    assert prompt is not None and not prompt.exact
    return prompt.data


# --- exact


def test_a_conversation_s_tokens_are_the_template_s(
    prompts: Prompts, local: ModelTokenizer
) -> None:
    messages = [USER, {"role": "assistant", "content": "Yo", "name": "x"}, USER]
    text = local.render(messages, True)
    assert exact(prompts, "chat", messages=messages) == token_bytes(local.encode(text, False))
    begun = exact(prompts, "chat", messages=messages, add_generation_prompt=False)
    assert begun == token_bytes(local.encode(local.render(messages, False), False))


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
        found, reason = read(prompts, "completions", model=model, prompt=prompt)
        assert found is not None and found.exact and reason is None
        assert found.data == token_bytes([1, 2, 3])


def test_a_long_text_is_read_in_a_thread_and_alike(prompts: Prompts, local: ModelTokenizer) -> None:
    seen: list[str] = []

    class Watched(ModelTokenizer):
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            seen.append(threading.current_thread().name)
            return local.encode(text, add_special_tokens)

        def encode_all(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
            seen.append(threading.current_thread().name)
            return local.encode_all(texts, add_special_tokens)

    watched = Prompts()
    watched.use_exact("m", Watched(local.tokenizer, local.template))
    assert exact(watched, "completions", prompt="Hi")
    assert exact(watched, "completions", prompt=LONG) == token_bytes(local.encode(LONG, True))
    watched.close()
    assert seen[0] == threading.current_thread().name
    assert seen[1].startswith("tokenize")


def test_a_long_text_is_read_by_its_pieces_and_alike(local: ModelTokenizer) -> None:
    made = Prompts()
    made.use_exact("m", local, by_pieces=True)
    for text in (LONG, LONG + LONG, LONG + "More?"):
        assert exact(made, "completions", prompt=text) == token_bytes(local.encode(text, True))
        messages = [{"role": "user", "content": text}]
        rendered = token_bytes(local.encode(local.render(messages, True), False))
        assert exact(made, "chat", messages=messages) == rendered
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
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"thinking": True}},
        {"continue_final_message": True},
        {"add_special_tokens": True},
        {"documents": [{"text": "x"}]},
        {"truncate_prompt_tokens": 5},
        {"reasoning_effort": "low"},
    ],
)
def test_options_that_change_a_conversation_s_text(prompts: Prompts, more: dict[str, Any]) -> None:
    assert unread(prompts, "chat", "option", messages=[USER], **more)


@pytest.mark.parametrize("more", [{"truncate_prompt_tokens": 5}, {"suffix": "x"}])
def test_options_that_change_a_text(prompts: Prompts, more: dict[str, Any]) -> None:
    assert unread(prompts, "completions", "option", prompt="Hi", **more) == b"Hi"


@pytest.mark.parametrize("more", [{"tools": []}, {"tools": None}, {"temperature": 0, "n": 2}])
def test_options_that_change_nothing(prompts: Prompts, more: dict[str, Any]) -> None:
    assert exact(prompts, "chat", messages=[USER], **more) == exact(
        prompts, "chat", messages=[USER]
    )


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "user", "content": None},
        {"role": "user"},
        {"content": "Hi"},
        {"role": 5, "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
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
    made = Prompts()
    made.use_exact("m", load_tokenizer(folder, None))
    assert unread(made, "chat", "template", messages=[USER])
    made.close()


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("chat", {}),
        ("chat", {"messages": []}),
        ("chat", {"messages": None}),
        ("completions", {}),
        ("completions", {"prompt": None}),
        ("completions", {"prompt": []}),
    ],
)
def test_no_prompt_is_none(prompts: Prompts, endpoint: str, fields: dict[str, Any]) -> None:
    for model in ("m", "other"):
        assert read(prompts, endpoint, model=model, **fields) == (None, "no_prompt")


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
    one = unread(prompts, "chat", "option", messages=[{**USER, "content": "a"}], tools=tools)
    other = unread(prompts, "chat", "option", messages=[{**USER, "content": "b"}], tools=tools)
    assert shared(one, other) > 200


def hashes(prompts: Prompts, **fields: Any) -> set[int]:
    prompt, _ = read(prompts, "completions", **{"model": "m", "prompt": [1] * 64, **fields})
    assert prompt is not None
    return set(prompt.chain(16).hashes)


def test_what_has_a_cache_of_its_own_is_kept_apart(prompts: Prompts) -> None:
    prompts.adapters.add("adapter")
    base = hashes(prompts)
    assert hashes(prompts, temperature=1) == hashes(prompts, model="alias") == base
    for other in ({"model": "adapter"}, {"cache_salt": "x"}, {"cache_salt": "y"}):
        assert base.isdisjoint(hashes(prompts, **other))
    assert hashes(prompts, cache_salt="x").isdisjoint(hashes(prompts, cache_salt="y"))
    assert hashes(prompts, model=None) == hashes(prompts, model=5)


# --- whatever comes

LEAVES = st.none() | st.booleans() | st.integers(-5, 1 << 33) | st.floats() | st.text(max_size=5)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(("role", "content", "text", "type", "name", "x")), inner, max_size=3
        )
    ),
    max_leaves=10,
)
FIELDS = st.dictionaries(
    st.sampled_from(
        ("messages", "prompt", "tools", "model", "cache_salt", "suffix", "add_special_tokens")
    ),
    JSON | st.just("m") | st.just([USER]),
)


@given(st.sampled_from(("chat", "completions")), FIELDS)
def test_no_request_is_an_error(prompts: Prompts, endpoint: str, fields: dict[str, Any]) -> None:
    fields = orjson.loads(orjson.dumps(fields))
    prompt, reason = read(prompts, endpoint, **{"model": "m", **fields})
    assert (reason is None) == (prompt is not None and prompt.exact)
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
