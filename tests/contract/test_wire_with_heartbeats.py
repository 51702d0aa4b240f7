"""Bytes of streams where heartbeats are on, none of which is due: nothing else changes."""

from tests.contract.test_endings import (  # noqa: F401
    test_c04_cut_between_head_and_first_event,
    test_c04_cut_inside_an_event_leaves_the_error_an_event_of_its_own,
    test_c04_truncated_stream_is_told_in_band,
)
from tests.contract.test_load import (  # noqa: F401
    test_c22_each_event_is_out_before_the_next_is_made,
    test_slow_readers_pause_the_worker,
)
from tests.contract.test_wire import (  # noqa: F401
    test_c05_the_workers_refusal_is_the_clients,
    test_c58_every_split_of_the_usage_event,
    test_c58_stream_is_untouched_but_for_the_usage_nobody_asked_for,
    test_c58_text_that_looks_like_framing,
    test_content_encoding_of_the_worker_is_relayed_raw,
    test_other_streams_pass_untouched,
)

GATEWAY_ARGS = ["--heartbeat-seconds", "60"]
