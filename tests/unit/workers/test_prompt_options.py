from __future__ import annotations

from pathlib import Path

import pytest

from gateway.workers.prompt_options import PromptOptions, prompt_options, with_whole_paths


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", PromptOptions()),
        (
            "--tokenizer org/name --chat-template t.jinja",
            PromptOptions("org/name", Path("t.jinja")),
        ),
        ("--chat_template=t.jinja", PromptOptions(chat_template=Path("t.jinja"))),
        ("--chat-template {{x}}", PromptOptions(chat_template="{{x}}")),
        ('--default-chat-template-kwargs {"a":1}', PromptOptions(defaults={"a": 1})),
        ("--default-chat-template-kwargs=[1]", PromptOptions()),
        ("--default-chat-template-kwargs {", PromptOptions()),
        ("--exclude-tools-when-tool-choice-none", PromptOptions(drops_tools=True)),
        ("--max-model-len 5 --chat-template-content-format openai", PromptOptions()),
    ],
)
def test_what_decides_the_prompt_is_read(arguments: str, expected: PromptOptions) -> None:
    assert prompt_options(arguments.split()) == expected


def test_files_are_named_by_their_whole_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jinja").write_text("x")
    (tmp_path / "tok").mkdir()
    given = ["--chat-template", "t.jinja", "--tokenizer=tok", "--seed", "t.jinja"]
    assert with_whole_paths(given) == [
        "--chat-template", str(tmp_path / "t.jinja"), f"--tokenizer={tmp_path / 'tok'}",
        "--seed", "t.jinja",
    ]  # fmt: skip
    other = ["--tokenizer", "org/name", "--chat-template={{ x }}"]
    assert with_whole_paths(other) == other
