from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.workers.scrape import Scrape, parse_scrape

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="org/model"} 3.0
vllm:num_requests_waiting{engine="0",model_name="org/model"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="org/model"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="org/model"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="org/model"} 400.0
vllm:num_preemptions_total{engine="0",model_name="org/model"} 1.0
vllm:num_preemptions_created{engine="0",model_name="org/model"} 1.7e+09
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="org/model"} 4.0
vllm:iteration_tokens_total_count{engine="0",model_name="org/model"} 10.0
vllm:iteration_tokens_total_sum{engine="0",model_name="org/model"} 500.0
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="910",swap_space="4"} 1.0
process_start_time_seconds 1.70000000012e+09
python_gc_collections_total{generation="0"} 5.0
"""


def test_the_engine_s_figures_are_read() -> None:
    assert parse_scrape(VLLM, None) == Scrape(
        running=3.0,
        waiting=2.0,
        kv_usage_ratio=0.25,
        prefix_queries=1000.0,
        prefix_hits=400.0,
        preemptions=1.0,
        step_tokens=500.0,
        steps=10.0,
        block_size=32,
        num_blocks=910,
        process_start=1.70000000012e9,
        tokens_per_step=None,
    )


@pytest.mark.parametrize(
    ("states", "asleep"),
    [
        ({"awake": 1, "weights_offloaded": 0, "discard_all": 0}, False),
        ({"awake": 0, "weights_offloaded": 1, "discard_all": 0}, True),
        ({"awake": 0, "weights_offloaded": 0, "discard_all": 1}, True),
        ({}, False),
    ],
)
def test_an_engine_that_is_not_awake_sleeps(states: dict[str, int], asleep: bool) -> None:
    lines = [f'vllm:engine_sleep_state{{sleep_state="{s}"}} {v}.0\n' for s, v in states.items()]
    assert parse_scrape("".join(lines), None).asleep is asleep


def test_names_of_older_releases_are_known() -> None:
    old = (
        "vllm:gpu_cache_usage_perc 0.5\n"
        "vllm:gpu_prefix_cache_queries_total 20\n"
        "vllm:gpu_prefix_cache_hits_total 5\n"
    )
    found = parse_scrape(old, None)
    assert (found.kv_usage_ratio, found.prefix_queries, found.prefix_hits) == (0.5, 20.0, 5.0)
    assert parse_scrape(old + "vllm:kv_cache_usage_perc 0.1\n", None).kv_usage_ratio == 0.1


@pytest.mark.parametrize("text", ["", "\n", "# only a comment\n", "other_metric 5\n"])
def test_what_is_absent_is_none_and_not_0(text: str) -> None:
    assert parse_scrape(text, None) == Scrape()


def test_engines_of_one_worker_are_taken_together() -> None:
    two = "".join(
        f'vllm:num_requests_running{{engine="{i}"}} {i + 1}\n'
        f'vllm:kv_cache_usage_perc{{engine="{i}"}} {0.2 + 0.2 * i}\n'
        f'vllm:iteration_tokens_total_sum{{engine="{i}"}} {100 * i}\n'
        f'vllm:cache_config_info{{engine="{i}",block_size="16",num_gpu_blocks="7"}} 1\n'
        for i in range(2)
    )
    found = parse_scrape(two, None)
    assert (found.running, found.step_tokens) == (3.0, 100.0)
    assert found.kv_usage_ratio == pytest.approx(0.3)
    assert (found.block_size, found.num_blocks) == (16, 7)


@pytest.mark.parametrize("value", ["None", "", "0", "-1", "1.5", "x"])
def test_a_block_count_that_is_none_is_not_known(value: str) -> None:
    found = parse_scrape(
        f'vllm:cache_config_info{{block_size="{value}",num_gpu_blocks="{value}"}} 1\n', None
    )
    assert (found.block_size, found.num_blocks) == (None, None)
    assert parse_scrape("vllm:cache_config_info 1\n", None).block_size is None


def steps(tokens: float, count: float, before: Scrape | None = None) -> Scrape:
    text = f"vllm:iteration_tokens_total_sum {tokens}\nvllm:iteration_tokens_total_count {count}\n"
    return parse_scrape(text, before)


def test_tokens_per_step_are_those_since_the_scrape_before() -> None:
    first = steps(500, 10)
    assert first.tokens_per_step is None
    second = steps(900, 14, first)
    assert second.tokens_per_step == 100.0
    assert steps(900, 14, second).tokens_per_step == 0.0, "no step, no tokens"


def test_tokens_per_step_of_an_engine_that_began_anew_are_not_known() -> None:
    assert steps(100, 2, steps(500, 10)).tokens_per_step is None
    assert steps(100, 2, Scrape()).tokens_per_step is None
    assert parse_scrape("", steps(500, 10)).tokens_per_step is None


def test_names_that_only_begin_alike_are_others() -> None:
    found = parse_scrape(
        "vllm:num_requests_running_by_lora 9\nvllm:num_requests_waiting_by_reason 9\n", None
    )
    assert (found.running, found.waiting) == (None, None)


def test_values_and_labels_of_every_form() -> None:
    found = parse_scrape(
        'vllm:num_requests_running{model_name="a \\"b\\" \\\\ {c} # d",x="é"} 1e3 1700000000000\n'
        "vllm:num_requests_waiting +Inf\n",
        None,
    )
    assert (found.running, found.waiting) == (1000.0, float("inf"))


@pytest.mark.parametrize(
    "line",
    ["vllm:num_requests_running", "vllm:num_requests_running{ 5", "vllm:num_requests_running x"],
)
def test_what_is_no_prometheus_text_is_a_value_error(line: str) -> None:
    with pytest.raises(ValueError):
        parse_scrape(line + "\n", None)


@given(st.text())
def test_any_text_is_read_or_a_value_error(tail: str) -> None:
    try:
        parse_scrape("vllm:num_requests_running" + tail, None)
    except ValueError:
        pass
