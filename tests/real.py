"""The gateway with two real vLLM workers that all engine and end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.up_process import MODEL, UpProcess, running
from tests.waiting import until


@pytest.fixture(scope="session")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    """`gateway up` on two CPU workers (or GPUs), ready; loaded once for the whole run."""
    assert MODEL.is_dir(), f"{MODEL} is missing: run `make model`"
    gateway = UpProcess(tmp_path_factory.mktemp("up"))
    with running(gateway, 2):
        yield gateway
    until("no process of the workers is left", lambda: not gateway.engine_processes(), 10)
