"""What prompts that must be tokenised do to others: `/health`, and the chunks of a stream.

Calm and loaded in turn, in front of the same stub workers: while loaded, a prompt of 30,000 tokens
that nobody has seen arrives every 100 ms.
"""

from __future__ import annotations

import json
import random
import socket
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from tests.bench.figures import CannotMeasure, Figure, as_json, print_figures
from tests.bench.processes import our_gateway, stub_workers
from tests.bench.stub_worker import DUE_DIGITS, DUE_MARK
from tests.documents import document
from tests.gateway_process import GatewayProcess
from tests.raw_http import exchange

MODEL = Path(".models/SmolLM2-135M-Instruct")
CHAT = "/v1/chat/completions"
WORDS, EVERY_SECONDS, SECONDS, ROUNDS = 29_000, 0.1, 6.0, 3
CHUNK_SECONDS = 0.01


def measure() -> dict[str, object]:
    if not MODEL.is_dir():
        raise CannotMeasure(f"there is no {MODEL}; make model")
    rng = random.Random(1)
    bodies = [_body(rng) for _ in range(int(ROUNDS * SECONDS / EVERY_SECONDS))]
    chunks = str(int(SECONDS / CHUNK_SECONDS))
    stubs = ("--chunks", chunks, "--gap-seconds", str(CHUNK_SECONDS))
    rounds = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = stack.enter_context(stub_workers(*stubs, "--model-folder", str(MODEL.resolve())))
        gateway = stack.enter_context(our_gateway(folder, workers))
        modes = gateway.samples()
        if modes.get(("gateway_prompt_mode", (("mode", "exact"), ("model", "m")))) != 1:
            raise CannotMeasure(f"prompts are not read as exact tokens: {gateway.log()}")
        for _ in range(ROUNDS):
            calm = _round(gateway, [])
            share = [bodies.pop() for _ in range(int(SECONDS / EVERY_SECONDS))]
            rounds.append({"calm": calm, "loaded": _round(gateway, share)})
    health = max(one["loaded"]["health_p99_ms"] for one in rounds)
    added = [one["loaded"]["worst_late_ms"] - one["calm"]["worst_late_ms"] for one in rounds]
    label = "30,000 unseen tokens every 100 ms"
    figures = [
        Figure(f"{label}: /health p99", health, "<", 100, "ms"),
        Figure(
            f"{label}: longest gap added to a stream", sorted(added)[ROUNDS // 2], "<", 20, "ms"
        ),
    ]
    print_figures(figures)
    return {"figures": as_json(figures), "details": rounds}


def _round(gateway: GatewayProcess, bodies: list[bytes]) -> dict[str, float]:
    late: list[float] = []
    health: list[float] = []
    ends = time.monotonic() + SECONDS
    threads = [
        threading.Thread(target=_stream, args=(gateway, late)),
        threading.Thread(target=_health, args=(gateway, health, ends)),
    ]
    threads += [threading.Thread(target=_send, args=(gateway, bodies, ends))] if bodies else []
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    late.sort()
    health.sort()
    return {
        "health_p99_ms": health[int(0.99 * (len(health) - 1))],
        "worst_late_ms": late[-1],
        "late_p99_ms": late[int(0.99 * (len(late) - 1))],
    }


def _stream(gateway: GatewayProcess, late: list[float]) -> None:
    """How much later than due each chunk came, milliseconds."""
    body = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"x"}]}'
    head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body))
    length = len(DUE_MARK) + DUE_DIGITS
    with socket.create_connection(("127.0.0.1", gateway.port), SECONDS) as client:
        client.sendall(head + body)
        seen = b""
        while b"[DONE]" not in seen:
            data = client.recv(65536)
            now = time.monotonic_ns()
            assert data, "the stream broke off"
            seen = seen[-length:] + data
            while (at := seen.find(DUE_MARK)) >= 0 and len(seen) >= at + length:
                late.append((now - int(seen[at + len(DUE_MARK) : at + length])) / 1e6)
                seen = seen[at + length :]


def _health(gateway: GatewayProcess, took: list[float], ends: float) -> None:
    while time.monotonic() < ends:
        began = time.monotonic()
        assert exchange(gateway.url, "/health").status == 200
        took.append((time.monotonic() - began) * 1e3)
        time.sleep(max(0.0, began + EVERY_SECONDS - time.monotonic()))


def _send(gateway: GatewayProcess, bodies: list[bytes], ends: float) -> None:
    for number, body in enumerate(bodies):
        began = ends - SECONDS + number * EVERY_SECONDS
        time.sleep(max(0.0, began - time.monotonic()))
        threading.Thread(target=_send_one, args=(gateway, body), daemon=True).start()


def _send_one(gateway: GatewayProcess, body: bytes) -> None:
    assert exchange(gateway.url, CHAT, body, seconds=60).status == 200


def _body(rng: random.Random) -> bytes:
    text = document(rng, WORDS)
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
