"""The command line and environment of each vLLM server that `gateway up` starts. Starts nothing."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gateway.workers.devices import split
from gateway.workers.ports import LOOPBACK
from gateway.workers.prompt_options import given_options, with_whole_paths

DEFAULT_CPU_WORKERS = 2
GC_PLUGIN = "gateway_gc_pauses"

# Sequences and tokens that one engine step may hold, by kind of device.
CPU_MAX_NUM_SEQS = 32
CPU_MAX_NUM_BATCHED_TOKENS = 2048
CUDA_MAX_NUM_SEQS = 1024
CUDA_MAX_NUM_BATCHED_TOKENS = 8192
CPU_KV_CACHE_GIB = 1

# From so many cores on, a worker's compute threads leave one to its API server and engine core.
CORES_WITH_ONE_TO_SPARE = 4

# vLLM looks for ports of its own upwards from VLLM_PORT: a range for each worker, below the ports
# that the kernel gives out, and by our pid, so that two gateways started together seldom share one.
INTERNAL_PORTS_FIRST = 10_000
INTERNAL_PORTS_EACH = 100
INTERNAL_PORT_RANGES = 220

REFUSED_ARGUMENTS = {
    "--model": "the model is named before `--`",
    "--host": "workers listen on loopback",
    "--port": "the gateway chooses the port of each worker",
    "--uds": "workers are reached over loopback TCP",
    "--ssl-keyfile": "workers speak plain HTTP on loopback",
    "--ssl-certfile": "workers speak plain HTTP on loopback",
    "--headless": "a worker needs its API server",
    "--api-server-count": "a worker has one API server",
    "-asc": "a worker has one API server",
    "--data-parallel-size": "the workers are the replicas; start more of them",
    "-dp": "the workers are the replicas; start more of them",
    "--nnodes": "a worker lives on one host",
}
PARALLEL_SIZES = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--prefill-context-parallel-size", "-pcp"),
)
MULTIPLIERS = {
    **{suffix: 1000**power for power, suffix in enumerate(("", "k", "m", "g"))},
    **{suffix: 1024**power for power, suffix in enumerate(("", "K", "M", "G"))},
}


class LaunchError(Exception):
    """The workers cannot be started as asked; says which argument is in the way, and why."""


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """What the user asks for. `vllm_args` are passed on unchanged; where ours differ, they win."""

    model: str
    vllm_args: tuple[str, ...] = ()
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_events: bool = True
    dev_mode: bool = False


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How to start one worker on any port. A limit is None where only vLLM knows it. With
    `kv_events` it is to tell us what it caches."""

    worker_id: str
    device: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    kv_events: bool = False

    def argv(self, port: int, arguments: Sequence[str] = ()) -> list[str]:
        """The address comes last, so that no other argument can move it."""
        return [*self.command, *arguments, "--host", LOOPBACK, "--port", str(port)]


@dataclass(frozen=True, slots=True)
class _Place:
    """What one worker runs on, and what vLLM must be told for that."""

    device: str
    cache_name: str
    environment: dict[str, str]


def plan_gpu_workers(
    request: LaunchRequest, gpus: Sequence[str], environment: Mapping[str, str]
) -> list[LaunchPlan]:
    """One worker for each GPU, or for as many as vLLM's parallel sizes in the arguments need.

    `gpus` are names as in CUDA_VISIBLE_DEVICES, `environment` is ours. Raises LaunchError.
    """
    each = _processes_per_worker(given_options(request.vllm_args))
    if len(gpus) % each:
        raise LaunchError(
            f"the parallel sizes ask for {each} GPUs per worker, which {len(gpus)} GPUs do not give"
        )
    places = []
    for names in split(gpus, len(gpus) // each):
        told = {"CUDA_VISIBLE_DEVICES": ",".join(names)}
        if "CUDA_VISIBLE_DEVICES" not in environment:
            # The names are our numbers then: make them the ones that nvidia-smi shows.
            told["CUDA_DEVICE_ORDER"] = environment.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        cache_name = "gpu-" + "-".join(names).replace("/", "-")
        places.append(_Place(f"GPU {','.join(names)}", cache_name, told))
    defaults = {
        "--max-num-seqs": str(CUDA_MAX_NUM_SEQS),
        "--max-num-batched-tokens": str(CUDA_MAX_NUM_BATCHED_TOKENS),
    }
    return _plans(request, places, defaults, environment)


def plan_cpu_workers(
    request: LaunchRequest, shares: Sequence[Sequence[int]], environment: Mapping[str, str]
) -> list[LaunchPlan]:
    """One worker for each share of the processor ids. Raises LaunchError."""
    given = given_options(request.vllm_args)
    each = _processes_per_worker(given)
    places = []
    for index, share in enumerate(shares):
        threads = share[:-1] if len(share) >= CORES_WITH_ONE_TO_SPARE else share
        if len(threads) < each:
            raise LaunchError(
                f"the parallel sizes ask for {each} processes per worker,"
                f" but there are only {len(threads)} cores for each"
            )
        ranks = [",".join(map(str, rank)) for rank in split(threads, each)]
        told = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(ranks)}
        if not {"--kv-cache-memory-bytes", "--gpu-memory-utilization"} & given.keys():
            told["VLLM_CPU_KVCACHE_SPACE"] = environment.get(
                "VLLM_CPU_KVCACHE_SPACE", str(CPU_KV_CACHE_GIB)
            )
        places.append(_Place(f"CPU {','.join(map(str, threads))}", f"cpu-{index}", told))
    defaults = {
        "--max-num-seqs": str(CPU_MAX_NUM_SEQS),
        "--max-num-batched-tokens": str(CPU_MAX_NUM_BATCHED_TOKENS),
        "--enforce-eager": "",  # compiling costs minutes at start and gains little here
        "--max-model-len": "auto",  # as much of the model's length as its KV cache can hold
    }
    return _plans(request, places, defaults, environment)


def _plans(
    request: LaunchRequest,
    places: Sequence[_Place],
    defaults: dict[str, str],
    environment: Mapping[str, str],
) -> list[LaunchPlan]:
    given = given_options(request.vllm_args)
    _refuse(given)
    if request.max_num_seqs is not None:
        defaults["--max-num-seqs"] = str(request.max_num_seqs)
    if request.max_num_batched_tokens is not None:
        defaults["--max-num-batched-tokens"] = str(request.max_num_batched_tokens)
    command = (
        *(sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", _absolute(request.model)),
        *_ours(defaults, given),
        *with_whole_paths(request.vllm_args),
    )
    first_range = os.getpid()
    return [
        LaunchPlan(
            worker_id=str(index),
            device=place.device,
            command=command,
            environment={
                **_shared_environment(request, environment),
                **place.environment,
                "VLLM_CACHE_ROOT": os.path.join(_cache_root(environment), place.cache_name),
                "VLLM_PORT": str(_internal_port(first_range + index)),
            },
            max_num_seqs=_limit("--max-num-seqs", defaults, given),
            max_num_batched_tokens=_limit("--max-num-batched-tokens", defaults, given),
            kv_events=request.kv_events and not _decides_events(given),
        )
        for index, place in enumerate(places)
    ]


def _ours(defaults: Mapping[str, str], given: Mapping[str, str]) -> list[str]:
    """Our arguments, without those that the user has decided in either sense."""
    wanted = {
        **defaults,
        "--enable-prompt-tokens-details": "",
        "--enable-force-include-usage": "",
        "--no-enable-log-requests": "",
        "--disable-uvicorn-access-log": "",
    }
    ours: list[str] = []
    for name, value in wanted.items():
        opposite = "--" + name[5:] if name.startswith("--no-") else "--no-" + name[2:]
        if name not in given and opposite not in given:
            ours += [name, value] if value else [name]
    return ours


def _decides_events(given: Mapping[str, str]) -> bool:
    """The user has events of their own, or no cache that could tell of any."""
    own = any(name.partition(".")[0] == "--kv-events-config" for name in given)
    return own or "--no-enable-prefix-caching" in given


def _refuse(given: Mapping[str, str]) -> None:
    for name in given:
        reason = REFUSED_ARGUMENTS.get(
            "--data-parallel-size" if name.startswith("--data-parallel") else name
        )
        if reason:
            raise LaunchError(f"{name} cannot be passed on to vLLM: {reason}")


def _limit(name: str, defaults: Mapping[str, str], given: Mapping[str, str]) -> int | None:
    if name in given:
        return _count(name, given[name])
    # A file given by --config comes after our arguments, and may hold anything.
    return None if "--config" in given else int(defaults[name])


def _processes_per_worker(given: Mapping[str, str]) -> int:
    product = 1
    for names in PARALLEL_SIZES:
        for name in names:
            product *= _count(name, given.get(name, "1"))
    return product


def _count(name: str, text: str) -> int:
    """vLLM's way of writing whole numbers: 4096, 4k (4000), 4K (4096), 1.5k."""
    match = re.fullmatch(r"(\d+(?:\.\d+(?=[kmg]))?)([kKmMgG]?)", text.strip())
    number = int(float(match[1]) * MULTIPLIERS[match[2]]) if match else 0
    if number < 1:
        raise LaunchError(f"{name} {text}: not a whole number above zero")
    return number


def _shared_environment(request: LaunchRequest, environment: Mapping[str, str]) -> dict[str, str]:
    shared = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **environment}
    if request.dev_mode:
        shared["VLLM_SERVER_DEV_MODE"] = "1"  # /reset_prefix_cache and its like are served in it
    if os.path.isdir(request.model):
        shared.setdefault("HF_HUB_OFFLINE", "1")
    allowed = shared.get("VLLM_PLUGINS")  # a list of the only plug-ins to load
    if allowed is not None and GC_PLUGIN not in allowed.split(","):
        shared["VLLM_PLUGINS"] = f"{allowed},{GC_PLUGIN}"
    return shared


def _absolute(model: str) -> str:
    """A local folder by its full path, since workers run elsewhere; a hub id as it is."""
    return str(Path(model).resolve()) if os.path.isdir(model) else model


def _cache_root(environment: Mapping[str, str]) -> str:
    """Where vLLM keeps its caches. Workers that fill one cache together can spoil it."""
    user_cache = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return environment.get("VLLM_CACHE_ROOT") or os.path.join(user_cache, "vllm")


def _internal_port(number: int) -> int:
    return INTERNAL_PORTS_FIRST + INTERNAL_PORTS_EACH * (number % INTERNAL_PORT_RANGES)
