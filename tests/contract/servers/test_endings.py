"""Ends other than well, on other servers."""

from tests.contract.test_endings import *  # noqa: F403
