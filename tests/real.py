"""The gateway with two real vLLM workers that all engine and end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.up_process import LOAD_SECONDS, MODEL, UpProcess
from tests.waiting import until


@pytest.fixture(scope="session")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    """`gateway up` on two CPU workers (or GPUs), ready; loaded once for the whole run."""
    assert MODEL.is_dir(), f"{MODEL} is missing: run `make model`"
    gateway = UpProcess(tmp_path_factory.mktemp("up"))
    try:
        until("both workers are ready", lambda: gateway.all_ready(2), LOAD_SECONDS)
        yield gateway
    except BaseException:
        print(gateway.log()[-8000:])
        raise
    finally:
        if gateway.process.poll() is None:
            gateway.stop()
    until("no process of the workers is left", lambda: not gateway.engine_processes(), 10)
