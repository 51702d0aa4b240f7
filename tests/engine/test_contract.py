"""The contract's cases that need no script, on real vLLM."""

import pytest

from tests.contract.test_api_contract import *  # noqa: F403

pytestmark = pytest.mark.timeout(420)
