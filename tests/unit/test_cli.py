from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from gateway import cli
from gateway.cli import app
from gateway.config import Settings, load_settings
from gateway.workers import devices
from tests.gateway_process import GatewayProcess

pytestmark = pytest.mark.usefixtures("no_settings")


def gateway(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def printed(*arguments: str) -> str:
    result = gateway("config", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def loaded(text: str) -> Settings:
    """The settings of a gateway.toml of that text."""
    Path("gateway.toml").write_text(text, encoding="utf-8")
    try:
        return load_settings({})
    finally:
        Path("gateway.toml").unlink()


CHOICES: list[list[str]] = [
    [],
    ["--port", "0", "--policy", "round_robin"],
    ["--worker", "http://a:1", "--worker", "https://b/base"],
    ["--gpus", "0,2", "--max-num-seqs", "8"],
    ["--social-weight", "1e-07", "--idle-seconds", "inf"],
    ["--tokenizer", 'C:\\models\\"odd" é', "--chat-template", "a b.jinja"],
    ["--state-dir", "/tmp/a'b"],
]


@pytest.mark.parametrize("arguments", CHOICES, ids=" ".join)
def test_config_prints_a_file_that_means_the_same(arguments: list[str]) -> None:
    text = printed(*arguments)
    given: dict[str, Any] = {}
    for flag, value in zip(arguments[::2], arguments[1::2], strict=True):
        name = flag.removeprefix("--").replace("-", "_")
        given[name] = [*given.get(name, []), value] if name == "worker" else value
    tomllib.loads(text)
    assert loaded(text) == load_settings(given)


@settings(max_examples=50)
@given(st.text(alphabet=st.characters(exclude_categories=("Cs",))))
def test_any_text_survives_the_file(value: str) -> None:
    assert tomllib.loads(printed(f"--tokenizer={value}"))["tokenizer"] == value


def test_config_shows_each_setting_once_and_says_what_is_not_set() -> None:
    lines = printed().splitlines()
    assert "# model is not set" in lines
    assert "port = 8000" in lines
    assert len(lines) == len(Settings.model_fields)


def test_config_shows_what_is_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("gateway.toml").write_text("port = 1\ndrain_seconds = 5\n")
    monkeypatch.setenv("GATEWAY_PORT", "2")
    shown = tomllib.loads(printed("--host", "0.0.0.0"))
    assert (shown["host"], shown["port"], shown["drain_seconds"]) == ("0.0.0.0", 2, 5.0)


@pytest.mark.parametrize("command", ["serve", "up", "config"])
def test_a_wrong_setting_ends_with_its_name_and_no_traceback(command: str) -> None:
    result = gateway(command, "--port", "http")
    assert result.exit_code == 2
    assert "port" in result.stderr and "integer" in result.stderr
    assert "Traceback" not in result.output


def test_text_of_the_user_is_shown_as_it_is() -> None:
    result = gateway("config", "--policy", "[red]x[/]")
    assert "[red]x[/]" in result.stderr


@pytest.mark.parametrize("command", ["serve", "up", "config"])
def test_an_unknown_flag_is_refused(command: str) -> None:
    result = gateway(command, "--prot", "1")
    assert result.exit_code == 2
    assert "--prot" in result.output


def test_up_needs_a_model() -> None:
    result = gateway("up")
    assert result.exit_code == 2
    assert "gateway up MODEL" in result.stderr


def test_the_template_that_is_named_is_the_workers_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda environment: [])
    chosen = Settings(model="org/model", chat_template=Path("/t.jinja"), cpu_workers=1)
    for arguments, expected in (((), "/t.jinja"), (("--chat-template", "/other"), "/other")):
        plans, _ = cli._plans(chosen, arguments)
        command = plans[0].command
        assert command.count("--chat-template") == 1
        assert command[command.index("--chat-template") + 1] == expected


def test_each_setting_is_a_flag_of_the_commands_that_use_it() -> None:
    def flags(command: str) -> set[str]:
        text = gateway(command, "--help").stdout
        return {name for name in Settings.model_fields if f"--{name.replace('_', '-')}" in text}

    everything = set(Settings.model_fields)
    assert flags("config") | {"model"} == everything
    up_only = {"model", "gpus", "cpu_workers", "kv_events", "start_seconds", "state_dir"}
    assert flags("serve") == everything - up_only
    assert flags("up") | {"model"} == everything - {"worker", "worker_kv_events"}


def test_no_command_shows_help() -> None:
    result = gateway()
    for command in ("serve", "up", "config"):
        assert command in result.output


def test_it_starts_without_workers_and_says_how_long_that_took(tmp_path: Path) -> None:
    began = time.monotonic()
    process = GatewayProcess(tmp_path, [])
    try:
        process.wait_ready(503)
        seconds = time.monotonic() - began
    finally:
        process.stop()
    print(f"gateway serve answers after {seconds:.2f} s")


def test_help_and_config_load_no_server() -> None:
    code = (
        "import sys; from gateway.cli import app\n"
        "app(['config'], standalone_mode=False)\n"
        "print(sorted({'fastapi', 'uvicorn', 'httpx', 'tokenizers', 'torch'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines()[-1] == "[]"
