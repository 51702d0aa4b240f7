"""The README's examples run as they stand; only the port is this run's."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.gateway_process import REPOSITORY
from tests.up_process import UpProcess

pytestmark = pytest.mark.timeout(420)

BLOCK = re.compile(r"```(python|bash)\n(.*?)```", re.DOTALL)
README = (REPOSITORY / "README.md").read_text()
PYTHON = [text for language, text in BLOCK.findall(README) if language == "python"]
CURL = [text for language, text in BLOCK.findall(README) if text.startswith("curl")]


def with_port(text: str, up: UpProcess) -> str:
    return text.replace("127.0.0.1:8000", up.url.removeprefix("http://"))


def test_there_are_examples() -> None:
    assert len(PYTHON) >= 2 and len(CURL) >= 1


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python(up: UpProcess, number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", with_port(PYTHON[number], up)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("number", range(len(CURL)))
def test_curl(up: UpProcess, number: int) -> None:
    command = with_port(CURL[number], up).replace("curl ", "curl -sSf ", 1)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
