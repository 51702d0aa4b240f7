"""The contract on other servers: each case here runs on every one of these."""

from __future__ import annotations

import pytest

SERVERS = [("h11", "asyncio"), ("httptools", "asyncio")]


@pytest.fixture(scope="module", params=SERVERS, ids="-".join)
def server(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(protocol of uvicorn's, event loop)."""
    return request.param


@pytest.fixture(scope="module")
def program(server: tuple[str, str]) -> list[str]:
    return ["-m", "tests.other_server", *server]
