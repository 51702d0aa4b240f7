"""Back-pressure, and when each byte comes out, on other servers."""

from tests.contract.test_load import (  # noqa: F401
    test_big_answer_arrives_whole,
    test_c02_c22_head_of_a_stream_comes_before_its_first_event,
    test_c20_two_hundred_streams_all_reach_the_workers,
    test_c22_each_event_is_out_before_the_next_is_made,
    test_slow_readers_pause_the_worker,
)
