"""What the gateway adds to streams, and what is left of clients that leave or hardly read.

Each measurement has a gateway and two stub workers of its own. "Direct" is the same client in front
of the same workers without the gateway, in turn with it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from tests.bench.figures import Figure, as_json, print_figures
from tests.bench.processes import MIB, allow_descriptors, our_gateway, run_client, stub_workers
from tests.gateway_process import GatewayProcess
from tests.raw_http import RawClient, exchange
from tests.waiting import until

PATH = "/v1/chat/completions"
STREAM = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"x"}]}'
PLAIN = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
QUIET_SECONDS = 10  # for what was cancelled to be gone
SLACK_SECONDS = 60  # over what a run takes on an idle machine

Measured = tuple[list[Figure], object]  # and details, for the JSON
Round = dict[str, dict[str, Any]]  # the client's report, "direct" and through the "gateway"


@dataclass(frozen=True)
class Load:
    """`streams` connections, each with so many streams after one another."""

    streams: int
    chunks: int
    gap_seconds: float
    each: int = 1
    spread_seconds: float = 0
    rounds: int = 1

    @property
    def seconds(self) -> float:
        return self.each * self.chunks * self.gap_seconds + self.spread_seconds

    def run(self, urls: Sequence[str]) -> dict[str, Any]:
        limit = self.seconds + SLACK_SECONDS
        report = run_client(
            "stream_client",
            *("--ports", *(urlsplit(url).port for url in urls)),
            *("--streams", self.streams, "--each", self.each, "--chunks", self.chunks),
            *("--spread-seconds", self.spread_seconds, "--limit-seconds", limit),
            seconds=2 * limit,
        )
        assert report["whole"], f"not one stream came through: {report}"
        return report

    def in_turn(self) -> list[Round]:
        chunks = ("--chunks", str(self.chunks), "--gap-seconds", str(self.gap_seconds))
        with _setting(*chunks) as (gateway, workers):
            return [
                {"direct": self.run(workers), "gateway": self.run([gateway.url])}
                for _ in range(self.rounds)
            ]


# Starts spread over a second show what is added to chunks of many running streams; starts in one
# instant show besides how long a thousand requests to place hold up the chunks of those placed.
MANY = Load(streams=1000, chunks=50, gap_seconds=0.1, spread_seconds=1, rounds=3)
BURST = replace(MANY, spread_seconds=0)
QUICK = Load(streams=256, chunks=32, gap_seconds=0.02, each=4, spread_seconds=0.64, rounds=3)
CANCELLED = 10_000
READERS, READ_SECONDS = 50, 10.0


def measure() -> dict[str, object]:
    allow_descriptors(4 * MANY.streams)
    parts: dict[str, Callable[[], Measured]] = {
        "lateness": lambda: lateness(MANY),
        "lateness_of_a_burst": lambda: lateness(BURST),
        "first_byte": lambda: first_byte(QUICK),
        "cancelled": lambda: cancelled(CANCELLED),
        "slow_readers": lambda: slow_readers(READERS, READ_SECONDS),
    }
    figures: list[Figure] = []
    details: dict[str, object] = {}
    for name, part in parts.items():
        found, details[name] = part()
        print_figures(found)
        figures += found
    return {"figures": as_json(figures), "details": details}


def lateness(load: Load) -> Measured:
    rounds = load.in_turn()
    starts = f"started over {load.spread_seconds:g} s" if load.spread_seconds else "as a burst"
    label = f"{load.streams:,} streams of {load.gap_seconds * 1000:g} ms chunks {starts}"
    whole = min(round_["gateway"]["whole"] for round_ in rounds)
    added_ms = _added(rounds, "lateness_ms", "p99")
    figures = [
        Figure(f"{label}: whole", whole, "=", load.streams * load.each),
        Figure(f"{label}: p99 lateness over direct", added_ms, "<", 20, "ms"),
    ]
    return figures, rounds


def first_byte(load: Load) -> Measured:
    rounds = load.in_turn()
    label = f"{load.streams} streams of {load.gap_seconds * 1000:g} ms chunks: first byte"
    figures = [
        Figure(f"{label}, {p} added", _added(rounds, "first_byte_ms", p), "<", limit, "ms")
        for p, limit in (("p50", 1), ("p99", 5))
    ]
    return figures, rounds


def _added(rounds: Sequence[Round], what: str, percent: str) -> float:
    """Median over the rounds of what the gateway's run has over the direct one."""
    return float(median(r["gateway"][what][percent] - r["direct"][what][percent] for r in rounds))


def cancelled(requests: int) -> Measured:
    """Answers take 0.12 s, clients stay up to 0.14 s: some see the end, the others every phase."""
    pace = ("--chunks", "20", "--gap-seconds", "0.005", "--first-seconds", "0.02")
    with _setting(*pace, "--plain-seconds", "0.12") as (gateway, _):
        clients = run_client(
            "cancelling_client",
            *("--port", gateway.port, "--requests", requests, "--longest-seconds", 0.14),
            *("--limit-seconds", SLACK_SECONDS + requests / 500),
            seconds=2 * SLACK_SECONDS + requests / 500,
        )
        began = time.monotonic()
        with suppress(AssertionError):  # what is left shows in the figures
            until("nothing is left", lambda: not any(_left(gateway).values()), QUIET_SECONDS)
        quiet_seconds = time.monotonic() - began
        left = _left(gateway)
        status = exchange(gateway.url, PATH, PLAIN).status
        outcomes = {
            name: gateway.total("gateway_requests_total", outcome=name)
            for name in ("ok", "client_gone", "upstream_error", "refused")
        }
    figures = [
        Figure(f"{requests:,} cancelled: {what}", value, "=", 0) for what, value in left.items()
    ]
    figures += [
        Figure(f"{requests:,} cancelled: failed otherwise", clients.get("failed", 0), "=", 0),
        Figure(f"{requests:,} cancelled: status of the next request", status, "=", 200),
    ]
    return figures, {"clients": clients, "quiet_seconds": quiet_seconds, "outcomes": outcomes}


def _left(gateway: GatewayProcess) -> dict[str, float]:
    return {
        "connections in use": gateway.total("gateway_upstream_connections", state="active"),
        "in flight": gateway.total("gateway_in_flight_requests"),
        "CLOSE_WAIT": sum(state == "CLOSE_WAIT" for _, _, state in gateway.sockets()),
    }


def slow_readers(readers: int, seconds: float) -> Measured:
    """Each takes a few KiB ten times a second of an answer of 200 MB."""
    read_bytes = 0
    with _setting("--plain-bytes", "200000000", "--chunks", "2") as (gateway, _), ExitStack() as s:
        assert exchange(gateway.url, PATH, STREAM).status == 200  # what is loaded once is loaded
        before = peak = gateway.resident_bytes()
        clients = [
            s.enter_context(RawClient(gateway.url, receive_buffer_bytes=8192))
            for _ in range(readers)
        ]
        for client in clients:
            client.send("POST", PATH, PLAIN)
        answers = [(client, client.read_head()) for client in clients]
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for client, answer in answers:
                read_bytes += len(next(client.read_pieces(answer), b""))
                answer.pieces.clear()
            peak = max(peak, gateway.resident_bytes())
            time.sleep(0.1)
        cut = sum(answer.end == "cut" or answer.status != 200 for _, answer in answers)
    figures = [
        Figure(
            f"{readers} slow readers of 200 MB: memory grown", (peak - before) / MIB, "<", 64, "MiB"
        ),
        Figure(f"{readers} slow readers of 200 MB: cut off", cut, "=", 0),
    ]
    return figures, {"seconds": seconds, "read_mib": round(read_bytes / MIB, 1)}


@contextmanager
def _setting(*stub_arguments: str) -> Iterator[tuple[GatewayProcess, list[str]]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        stub_workers(*stub_arguments) as workers,
        our_gateway(Path(folder), workers) as gateway,
    ):
        yield gateway, workers
