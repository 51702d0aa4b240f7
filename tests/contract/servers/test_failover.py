"""Workers that are away, on other servers."""

from tests.contract.test_failover import (  # noqa: F401
    alone,
    test_c16_c05_all_workers_die,
    test_c16_no_worker_at_all,
    test_c45_no_connection_within_the_limit_goes_to_the_next_worker,
    test_c45_refused_goes_to_the_next_worker_unseen,
    test_streams_of_the_other_worker_go_on,
)
