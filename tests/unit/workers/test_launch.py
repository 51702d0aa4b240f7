from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gateway.workers.launch import (
    CPU_MAX_NUM_BATCHED_TOKENS,
    CPU_MAX_NUM_SEQS,
    CUDA_MAX_NUM_BATCHED_TOKENS,
    CUDA_MAX_NUM_SEQS,
    REFUSED_ARGUMENTS,
    LaunchError,
    LaunchPlan,
    LaunchRequest,
    plan_cpu_workers,
    plan_gpu_workers,
)
from gateway.workers.prompt_options import prompt_options

ENVIRONMENT = {"PATH": "/usr/bin", "HOME": "/home/someone", "XDG_CACHE_HOME": "/caches"}


def on_cpu(*vllm_args: str, model: str = "org/model", **environment: str) -> list[LaunchPlan]:
    request = LaunchRequest(model, vllm_args)
    return plan_cpu_workers(request, [[0, 1], [2, 3]], {**ENVIRONMENT, **environment})


def on_gpu(*vllm_args: str, gpus: str = "01", **environment: str) -> list[LaunchPlan]:
    return plan_gpu_workers(
        LaunchRequest("org/model", vllm_args), list(gpus), {**ENVIRONMENT, **environment}
    )


def values(plan: LaunchPlan, option: str) -> list[str]:
    argv = plan.argv(1234)
    return [argv[place + 1] for place, argument in enumerate(argv) if argument == option]


def test_the_command_starts_vllm_s_server_on_loopback() -> None:
    argv = on_cpu()[0].argv(4321)
    assert argv[:4] == [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    assert argv[4:6] == ["--model", "org/model"]
    assert argv[-4:] == ["--host", "127.0.0.1", "--port", "4321"]
    for option in (
        "--enable-prompt-tokens-details",
        "--enable-force-include-usage",
        "--no-enable-log-requests",
        "--disable-uvicorn-access-log",
        "--enforce-eager",
    ):
        assert argv.count(option) == 1
    assert "--block-size" not in argv


def test_workers_find_the_files_that_were_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jinja").write_text("x")
    (plan, _) = on_cpu("--chat-template", "t.jinja")
    assert values(plan, "--chat-template") == [str(tmp_path / "t.jinja")]
    assert prompt_options(plan.command).chat_template == tmp_path / "t.jinja"


def test_limits_are_always_passed_and_known() -> None:
    for plans, seqs, tokens in (
        (on_cpu(), CPU_MAX_NUM_SEQS, CPU_MAX_NUM_BATCHED_TOKENS),
        (on_gpu(), CUDA_MAX_NUM_SEQS, CUDA_MAX_NUM_BATCHED_TOKENS),
    ):
        for plan in plans:
            assert values(plan, "--max-num-seqs") == [str(seqs)]
            assert values(plan, "--max-num-batched-tokens") == [str(tokens)]
            assert (plan.max_num_seqs, plan.max_num_batched_tokens) == (seqs, tokens)


def test_limits_from_the_gateway_s_settings() -> None:
    request = LaunchRequest("org/model", max_num_seqs=7, max_num_batched_tokens=700)
    plan = plan_gpu_workers(request, ["0"], ENVIRONMENT)[0]
    assert values(plan, "--max-num-seqs") == ["7"]
    assert values(plan, "--max-num-batched-tokens") == ["700"]
    assert (plan.max_num_seqs, plan.max_num_batched_tokens) == (7, 700)


@pytest.mark.parametrize(
    ("arguments", "known"),
    [
        (["--max-num-seqs", "9"], 9),
        (["--max-num-seqs=9"], 9),
        (["--max_num_seqs", "9"], 9),
        (["--seed", "-1", "--max_num_seqs=9"], 9),
        (["--max-num-seqs", "5", "--max-num-seqs", "9"], 9),  # as argparse: the last one counts
    ],
)
def test_the_user_s_limit_wins_and_is_the_known_one(arguments: list[str], known: int) -> None:
    request = LaunchRequest("org/model", tuple(arguments), max_num_seqs=3)
    plan = plan_cpu_workers(request, [[0]], ENVIRONMENT)[0]
    assert plan.max_num_seqs == known
    argv = plan.argv(1)
    assert argv[-4 - len(arguments) : -4] == arguments
    assert "3" not in argv


@pytest.mark.parametrize(
    ("text", "tokens"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("1M", 2**20)]
)
def test_vllm_s_way_of_writing_numbers(text: str, tokens: int) -> None:
    assert on_cpu("--max-num-batched-tokens", text)[0].max_num_batched_tokens == tokens


@pytest.mark.parametrize("text", ["", "many", "0", "-5", "1.5", "1.5K", "0.0001k"])
def test_a_limit_that_is_no_number_is_refused_by_name(text: str) -> None:
    with pytest.raises(LaunchError, match="--max-num-seqs"):
        on_cpu(f"--max-num-seqs={text}")


def test_limits_are_unknown_when_a_configuration_file_may_hold_them() -> None:
    plan = on_cpu("--config", "/etc/vllm.yaml", "--max-num-seqs", "9")[0]
    assert (plan.max_num_seqs, plan.max_num_batched_tokens) == (9, None)


@pytest.mark.parametrize(
    "decided",
    [
        ["--no-enforce-eager"],
        ["--no-enable-prompt-tokens-details"],
        ["--enable-log-requests"],
        ["--no-disable-uvicorn-access-log"],
        ["--max-model-len", "512"],
    ],
)
def test_what_the_user_decides_is_not_decided_again(decided: list[str]) -> None:
    name = decided[0].removeprefix("--no-").removeprefix("--")
    argv = on_cpu(*decided)[0].argv(1)
    assert [argument for argument in argv if argument.endswith(name)] == decided[:1]


@pytest.mark.parametrize("name", [*REFUSED_ARGUMENTS, "--data-parallel-rank"])
def test_arguments_that_are_the_gateway_s_are_refused_by_name(name: str) -> None:
    for arguments in ([name, "1"], [f"{name}=1"], [f"{name[:2]}{name[2:].replace('-', '_')}", "1"]):
        with pytest.raises(LaunchError, match=f"^{name} "):
            on_cpu(*arguments)


def test_a_local_model_is_found_from_everywhere_and_nothing_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    local = on_cpu(model="model")[0]
    assert values(local, "--model") == [str(tmp_path / "model")]
    assert local.environment["HF_HUB_OFFLINE"] == "1"
    assert on_cpu(model="model", HF_HUB_OFFLINE="0")[0].environment["HF_HUB_OFFLINE"] == "0"
    assert "HF_HUB_OFFLINE" not in on_cpu(model="org/model")[0].environment


def test_each_cpu_worker_has_its_own_cores_caches_and_ports() -> None:
    first, second = on_cpu()
    assert [first.worker_id, second.worker_id] == ["0", "1"]
    assert first.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert second.environment["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert first.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert first.environment["VLLM_CACHE_ROOT"] == "/caches/vllm/cpu-0"
    assert second.environment["VLLM_CACHE_ROOT"] == "/caches/vllm/cpu-1"
    ports = {int(plan.environment["VLLM_PORT"]) for plan in (first, second)}
    assert len(ports) == 2
    assert all(1024 < port < 32_768 for port in ports)
    assert first.environment["PATH"] == "/usr/bin"


def test_large_cpu_workers_leave_a_core_to_the_engine_core() -> None:
    plan = plan_cpu_workers(LaunchRequest("org/model"), [[4, 5, 6, 7]], ENVIRONMENT)[0]
    assert plan.environment["VLLM_CPU_OMP_THREADS_BIND"] == "4,5,6"


def test_cpu_workers_of_several_processes_bind_each() -> None:
    assert on_cpu("-tp", "2")[1].environment["VLLM_CPU_OMP_THREADS_BIND"] == "2|3"
    with pytest.raises(LaunchError, match="3 processes per worker"):
        on_cpu("--tensor-parallel-size=3")


@pytest.mark.parametrize("argument", ["--kv-cache-memory-bytes", "--gpu-memory-utilization"])
def test_the_kv_cache_s_size_is_left_to_the_user(argument: str) -> None:
    assert "VLLM_CPU_KVCACHE_SPACE" not in on_cpu(argument, "1")[0].environment
    plan = on_cpu(VLLM_CPU_KVCACHE_SPACE="8")[0]
    assert plan.environment["VLLM_CPU_KVCACHE_SPACE"] == "8"


def test_each_gpu_worker_sees_its_gpu_alone() -> None:
    first, second = on_gpu(gpus="01")
    assert first.environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert second.environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert first.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert second.environment["VLLM_CACHE_ROOT"] == "/caches/vllm/gpu-1"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in first.environment
    assert "--enforce-eager" not in first.argv(1)
    assert "--max-model-len" not in first.argv(1)


def test_the_meaning_of_visible_devices_is_kept() -> None:
    plan = on_gpu(gpus="5", CUDA_VISIBLE_DEVICES="3,5")[0]
    assert plan.environment["CUDA_VISIBLE_DEVICES"] == "5"
    assert "CUDA_DEVICE_ORDER" not in plan.environment


def test_parallel_sizes_give_a_worker_several_gpus() -> None:
    plans = on_gpu("-tp", "2", "--pipeline-parallel-size", "2", gpus="01234567")
    assert [plan.environment["CUDA_VISIBLE_DEVICES"] for plan in plans] == ["0,1,2,3", "4,5,6,7"]
    with pytest.raises(LaunchError, match="2 GPUs per worker, which 3 GPUs do not give"):
        on_gpu("-tp", "2", gpus="012")


@pytest.mark.parametrize(
    ("allowed", "passed"),
    [
        ("", ",gateway_gc_pauses"),
        ("other", "other,gateway_gc_pauses"),
        ("other,gateway_gc_pauses", "other,gateway_gc_pauses"),
    ],
)
def test_our_plugin_is_among_those_that_vllm_may_load(allowed: str, passed: str) -> None:
    assert on_cpu(VLLM_PLUGINS=allowed)[0].environment["VLLM_PLUGINS"] == passed
    assert "VLLM_PLUGINS" not in on_cpu()[0].environment


def test_nothing_is_reported_home_unless_the_user_says_so() -> None:
    environment = on_cpu(DO_NOT_TRACK="0")[0].environment
    assert (environment["VLLM_NO_USAGE_STATS"], environment["DO_NOT_TRACK"]) == ("1", "0")


def test_our_own_environment_is_not_changed() -> None:
    before = dict(os.environ)
    plan_cpu_workers(LaunchRequest("org/model"), [[0]], os.environ)
    assert dict(os.environ) == before


def test_workers_tell_what_they_cache_unless_it_was_decided_otherwise() -> None:
    assert all(plan.kv_events for plan in (*on_cpu(), *on_gpu()))
    for decided in (
        ["--kv-events-config", "{}"],
        ["--kv_events_config={}"],
        ["--kv-events-config.publisher", "zmq"],
        ["--no-enable-prefix-caching"],
    ):
        assert not any(plan.kv_events for plan in on_cpu(*decided))
    request = LaunchRequest("org/model", kv_events=False)
    assert not any(plan.kv_events for plan in plan_gpu_workers(request, ["0"], ENVIRONMENT))


def test_arguments_of_one_start_come_before_the_address() -> None:
    argv = on_cpu()[0].argv(4321, ["--kv-events-config", "{}"])
    assert argv[-6:] == ["--kv-events-config", "{}", "--host", "127.0.0.1", "--port", "4321"]


def test_dev_mode_is_vllm_s_own_only_where_it_is_asked_for() -> None:
    asked = LaunchRequest("org/model", dev_mode=True)
    (plan,) = plan_cpu_workers(asked, [[0]], ENVIRONMENT)
    assert plan.environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert "VLLM_SERVER_DEV_MODE" not in on_cpu()[0].environment
