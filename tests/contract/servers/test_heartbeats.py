"""Heartbeats, on other servers."""

from tests.contract.test_heartbeats import (  # noqa: F401
    GATEWAY_ARGS,
    test_c24_a_late_refusal_is_told_in_band,
    test_c24_before_the_first_token,
    test_c24_c02_client_that_leaves_between_two_frees_the_worker,
)
