from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.prompt.chat_template import TemplateFailed
from gateway.prompt.conversation import Conversation
from gateway.prompt.tokenizer import ModelTokenizer, TokenizerMissing, load_tokenizer
from tests.unit.prompt.tiny import BEGIN, BOS, END, TEMPLATE, model_folder

SAID = Conversation([{"role": "user", "content": "Hi"}], begins=False)


def load(folder: Path, template: Path | None = None, **config: object) -> ModelTokenizer:
    return load_tokenizer(model_folder(folder, **config), template)


def test_text_is_encoded_with_or_without_special_tokens(tmp_path: Path) -> None:
    local = load(tmp_path)
    plain = local.encode("ab", False)
    assert len(plain) == 2
    assert local.encode("ab", True) == [BOS, *plain]
    assert local.encode("", False) == []


def test_text_is_neither_cut_nor_padded(tmp_path: Path) -> None:
    assert len(load(tmp_path).encode("a long text of many tokens, more than 32", False)) == 40
    assert len(load(tmp_path).encode("a", False)) == 1


def test_any_text_has_ids(tmp_path: Path) -> None:
    local = load(tmp_path)
    for text in ("\0", "é🙂\u200d", "\r\n\t", "a" * 10_000, "\ufffd"):
        assert len(local.encode(text, False)) == len(text.encode())


def test_special_words_are_single_tokens(tmp_path: Path) -> None:
    assert load(tmp_path).encode("<|im_start|>a<|im_end|>", False)[::2] == [BEGIN, END]


def test_the_template_of_the_config_is_taken(tmp_path: Path) -> None:
    local = load(tmp_path, chat_template=TEMPLATE)
    assert local.render(SAID) == "<|im_start|>user\nHi<|im_end|>\n"


def test_a_template_of_its_own_file_goes_before_the_config(tmp_path: Path) -> None:
    model_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("own é", encoding="utf-8")
    assert load(tmp_path, chat_template=TEMPLATE).render(SAID) == "own é"
    given = tmp_path / "given.jinja"
    given.write_text("given")
    assert load(tmp_path, given, chat_template=TEMPLATE).render(SAID) == "given"


@pytest.mark.parametrize("template", [None, [{"name": "rag", "template": "x"}, {"name": 5}], 5])
def test_a_model_without_a_template_refuses_conversations(tmp_path: Path, template: object) -> None:
    local = load(tmp_path, chat_template=template)
    assert local.template is None
    with pytest.raises(TemplateFailed, match="no chat template"):
        local.render(SAID)
    assert local.encode("a", False)


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    local = load(tmp_path, chat_template=named)
    assert local.render(SAID) == "plain"
    for tools in ([], [{"type": "function"}]):
        assert local.render(replace(SAID, tools=tools)) == "tools"


def test_a_template_given_as_text(tmp_path: Path) -> None:
    local = load_tokenizer(model_folder(tmp_path, chat_template=TEMPLATE), "{{ 'given' }}")
    assert local.render(SAID) == "given"


def test_variables_that_the_worker_sets_itself(tmp_path: Path) -> None:
    local = replace(load(tmp_path, chat_template="{{ a }}{{ b }}"), defaults={"a": 1, "b": 2})
    assert local.render(SAID) == "12"
    assert local.render(replace(SAID, variables={"b": 3})) == "13"


def test_special_tokens_are_text_or_objects(tmp_path: Path) -> None:
    local = load(
        tmp_path,
        bos_token={"content": "<s>", "lstrip": False},
        eos_token="</s>",
        pad_token=None,
        other="x",
        chat_template="{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ other }}",
    )
    assert local.render(SAID) == "<s></s>"


def test_a_folder_without_a_config_is_enough(tmp_path: Path) -> None:
    model_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path, None).template is None


# --- what cannot be read


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerMissing, match=r"tokenizer\.json: No such file"):
        load_tokenizer(tmp_path, None)


@pytest.mark.parametrize("content", [b"", b"{}", b"not JSON", b"\xff\xfe", b'{"model":{}}'])
def test_what_is_no_tokenizer_says_so(tmp_path: Path, content: bytes) -> None:
    model_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerMissing, match="tokenizer"):
        load_tokenizer(tmp_path, None)


def test_a_pointer_to_a_large_file_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(TokenizerMissing):
        load_tokenizer(tmp_path, None)


def test_a_config_that_is_no_json_says_so(tmp_path: Path) -> None:
    model_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerMissing, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path, None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps([1]))
    assert load_tokenizer(tmp_path, None).template is None


def test_a_template_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerMissing, match="no such chat template"):
        load(tmp_path, tmp_path / "missing.jinja", chat_template=TEMPLATE)


def test_a_template_that_is_none_says_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerMissing, match="chat template cannot be read"):
        load(tmp_path, chat_template="{% if %}")


def test_a_template_that_is_no_text_says_so(tmp_path: Path) -> None:
    given = tmp_path / "given.jinja"
    given.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(TokenizerMissing):
        load(tmp_path, given)
