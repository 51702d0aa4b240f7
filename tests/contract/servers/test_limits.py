"""Limits that are told on the wire, on other servers."""

from tests.contract.test_limits import (  # noqa: F401
    GATEWAY_ARGS,
    test_c17_no_head_within_the_limit_is_a_504,
    test_c17_silence_in_a_plain_answer_cuts_it,
    test_c17_silence_mid_stream_is_told_in_band,
    test_c28_announced_too_big_is_refused_before_it_is_sent,
    test_c28_body_up_to_the_limit_passes,
    test_c28_chunked_too_big_is_refused_when_it_is,
    test_c28_sdk_that_sends_all_before_it_reads_sees_the_413,
    test_slow_reader_is_not_a_silent_worker,
)
