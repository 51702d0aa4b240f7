"""What a proxied request and a streamed chunk cost: ours beside other gateways, in one run.

Each gateway has a core to itself; the stub workers and wrk share another one. Cost is the CPU time
of the gateway's whole process tree over what it carried, which holds on a machine where rates do
not. The gateways take turns, each started afresh, so that a slow moment does not meet one of them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.bench.figures import CannotMeasure, Figure, as_json, print_figures
from tests.bench.peers import OURS, SGLANG_ROUTER, VLLM_ROUTER, Contender, ours, peers
from tests.bench.processes import (
    cpu_seconds,
    end,
    free_ports,
    gateway_core,
    load_core,
    on_core,
    plain_environment,
    resident_mib,
    stub_workers,
)
from tests.gateway_process import REPOSITORY
from tests.raw_http import exchange
from tests.waiting import until

PATH = "/v1/chat/completions"
CONNECTIONS = 64
START_SECONDS = 60
WARM_SECONDS = 1
QUESTION = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
WORDS = "lorem ipsum dolor sit amet "
SCRIPT = """wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '{"model":"m","messages":[{"role":"user","content":"' .. string.rep("%s", %d) ..
  '"}],"max_tokens":16%s}'
"""
DONE = re.compile(r"(\d+) requests in")
REFUSED = re.compile(r"Non-2xx or 3xx responses: (\d+)")
SOCKET_ERRORS = re.compile(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)")


@dataclass(frozen=True)
class Work:
    """What every request asks for: so many repetitions of WORDS, and whether as a stream."""

    key: str
    name: str
    unit: str
    repetitions: int
    stream: bool = False


SMALL = Work("json_2kb_us", "JSON, 2 KB body", "us/request", 80)
LARGE = Work("json_29kb_us", "JSON, 29 KB body", "us/request", 1100)  # about 6,000 tokens
CHUNK = Work("chunk_us", "streamed chunk", "us/chunk", 80, stream=True)  # 64 events, 10 ms apart
WORKS = (SMALL, LARGE, CHUNK)


@dataclass(frozen=True)
class Turn:
    """One gateway once: CPU microseconds per unit of each work, memory after all of them."""

    cpu_us: dict[Work, float]
    resident_mib: float
    failures: int


def measure(seconds: int, rounds: int, with_peers: bool) -> dict[str, object]:
    if shutil.which("wrk") is None:
        raise CannotMeasure("wrk is missing: apt-get install wrk")
    contenders = [ours(), *(peers() if with_peers else [])]
    turns: dict[str, list[Turn]] = {each.name: [] for each in contenders}
    with tempfile.TemporaryDirectory() as name, stub_workers() as workers:
        scripts = {work: _script(Path(name), work) for work in WORKS}
        for number in range(rounds):
            first = number % len(contenders)
            for contender in contenders[first:] + contenders[:first]:
                with _started(contender, workers, Path(name)) as (pid, url):
                    turn = _turn(pid, url, workers, scripts, seconds)
                turns[contender.name].append(turn)
                _print_turn(number, contender.name, turn)
    middle = {name: _middle(found) for name, found in turns.items()}
    _print_table(middle)
    figures = _figures(middle)
    print_figures(figures)
    return {
        "method": f"{rounds} rounds of {seconds} s for each work, {CONNECTIONS} connections",
        "gateways": {name: _turn_json(turn) for name, turn in middle.items()},
        "rounds": {name: [_turn_json(turn) for turn in found] for name, found in turns.items()},
        "figures": as_json(figures),
    }


def _script(folder: Path, work: Work) -> Path:
    path = folder / f"{work.repetitions}-{work.stream}.lua"
    path.write_text(SCRIPT % (WORDS, work.repetitions, ',"stream":true' if work.stream else ""))
    return path


@contextmanager
def _started(
    contender: Contender, workers: Sequence[str], folder: Path
) -> Iterator[tuple[int, str]]:
    """The gateway's pid and URL, once it answers a chat request through a worker."""
    port, metrics_port = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    log = folder / f"{contender.name}-{port}.log"
    with log.open("wb") as out, on_core(gateway_core()):
        process = subprocess.Popen(
            contender.command(port, metrics_port, workers),
            cwd=folder,
            env={**plain_environment(), "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def answers() -> bool:
        assert process.poll() is None, f"{contender.name} ended:\n{log.read_text()}"
        try:
            return exchange(url, PATH, QUESTION, seconds=5).status == 200
        except (ConnectionError, TimeoutError, EOFError):
            return False

    try:
        until(f"{contender.name} answers", answers, START_SECONDS)
        yield process.pid, url
    finally:
        end(process)


def _turn(
    pid: int, url: str, workers: Sequence[str], scripts: dict[Work, Path], seconds: int
) -> Turn:
    cpu_us: dict[Work, float] = {}
    failures = 0
    _wrk(url, scripts[SMALL], WARM_SECONDS)
    for work, script in scripts.items():
        sent, spent = _sent(workers), cpu_seconds(pid)
        done, failed = _wrk(url, script, seconds)
        spent = cpu_seconds(pid) - spent
        # Chunks are counted where they are made: streams that the end of the window cuts off have
        # cost something as well.
        units = _sent(workers) - sent if work.stream else done
        assert units, f"nothing came through: {work.name}, {failed} failures"
        cpu_us[work] = spent * 1e6 / units
        failures += failed
    return Turn(cpu_us, resident_mib(pid), failures)


def _sent(workers: Sequence[str]) -> int:
    return sum(int(exchange(url, "/sent").body) for url in workers)


def _wrk(url: str, script: Path, seconds: int) -> tuple[int, int]:
    """(requests answered whole, failures)"""
    load = ["-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "--timeout", "20s", "-s", str(script)]
    with on_core(load_core()):
        process = subprocess.Popen(
            ["wrk", *load, url + PATH], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
    try:
        out, _ = process.communicate(timeout=seconds + START_SECONDS)
    finally:
        end(process)
    done = DONE.search(out)
    assert done, f"wrk says no count:\n{out}"
    failed = [int(n) for found in (REFUSED, SOCKET_ERRORS) for n in _numbers(found, out)]
    return int(done[1]), sum(failed)


def _numbers(pattern: re.Pattern[str], text: str) -> tuple[str, ...]:
    found = pattern.search(text)
    return found.groups() if found else ()


def _middle(turns: Sequence[Turn]) -> Turn:
    return Turn(
        {work: median(turn.cpu_us[work] for turn in turns) for work in WORKS},
        median(turn.resident_mib for turn in turns),
        sum(turn.failures for turn in turns),
    )


def _figures(middle: dict[str, Turn]) -> list[Figure]:
    """Bounds that are a peer's figure of this run; none without the peers."""
    us = middle[OURS].cpu_us
    vllm, sglang = middle.get(VLLM_ROUTER), middle.get(SGLANG_ROUTER)
    chunk_limit = 1.05 * sglang.cpu_us[CHUNK] if sglang else None
    memory_limit = min(vllm.resident_mib, sglang.resident_mib) if vllm and sglang else None
    figures = [
        Figure(w.name, us[w], "<", vllm.cpu_us[w] if vllm else None, w.unit, VLLM_ROUTER)
        for w in (SMALL, LARGE)
    ]
    whose = f"1.05 x {SGLANG_ROUTER}"
    figures += [
        Figure(CHUNK.name, us[CHUNK], "<=", chunk_limit, CHUNK.unit, whose),
        Figure("memory", middle[OURS].resident_mib, "<", memory_limit, "MiB", "the lower of both"),
        Figure("failures", middle[OURS].failures, "=", 0),
    ]
    return figures


def _print_turn(number: int, name: str, turn: Turn) -> None:
    costs = ", ".join(f"{work.name} {turn.cpu_us[work]:.1f} us" for work in WORKS)
    print(f"round {number + 1} {name:14} {costs}, {turn.resident_mib:.0f} MiB", flush=True)


def _print_table(middle: dict[str, Turn]) -> None:
    """Medians; in brackets what ours is to that gateway's."""
    print(f"{'':14}", *(f"{work.name:>22}" for work in WORKS), f"{'MiB':>22}  failures")
    our = middle[OURS]
    for name, turn in middle.items():
        pairs = [(turn.cpu_us[w], our.cpu_us[w]) for w in WORKS]
        pairs.append((turn.resident_mib, our.resident_mib))
        cells = (f"{theirs:.1f} ({mine / theirs:.2f}x)" for theirs, mine in pairs)
        print(f"{name:14}", *(f"{cell:>22}" for cell in cells), f" {turn.failures:8}")


def _turn_json(turn: Turn) -> dict[str, object]:
    return {
        **{work.key: round(turn.cpu_us[work], 2) for work in WORKS},
        "resident_mib": round(turn.resident_mib, 1),
        "failures": turn.failures,
    }
