"""Engine tests run on the two real workers."""

from __future__ import annotations

import pytest

from tests.up_process import MODEL_NAME, UpProcess


@pytest.fixture
def gateway_url(up: UpProcess) -> str:
    return up.url


@pytest.fixture
def model_name() -> str:
    return MODEL_NAME
