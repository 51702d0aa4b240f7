from __future__ import annotations

import json
import socket

import pytest
import zmq

from gateway.workers.kv_endpoints import EventEndpoints, HeldEndpoints, parse_endpoints


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("none", None),
        ("tcp://gpu-1:5557", EventEndpoints("tcp://gpu-1:5557")),
        ("tcp://10.0.0.1:5557+5558", EventEndpoints("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558")),
        ("tcp://[::1]:1+2", EventEndpoints("tcp://[::1]:1", "tcp://[::1]:2")),
    ],
)
def test_what_the_operator_writes(text: str, meant: EventEndpoints | None) -> None:
    assert parse_endpoints(text) == meant


@pytest.mark.parametrize(
    "text",
    ["", "a:1", "tcp://a", "tcp://a:x", "tcp://a:0", "tcp://a:1+", "tcp://a:1+70000", "tcp://:1"],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="tcp://HOST:PORT"):
        parse_endpoints(text)


def test_held_ports_are_nobody_elses_and_ours_to_use() -> None:
    held = HeldEndpoints()
    name, config = held.arguments()
    told = json.loads(config)
    assert (name, told["enable_kv_cache_events"]) == ("--kv-events-config", True)
    assert (told["endpoint"], told["replay_endpoint"]) == (
        held.endpoints.live,
        held.endpoints.replay,
    )
    assert "*" not in told["endpoint"], "vLLM would listen on all addresses"
    port = int(held.endpoints.live.rpartition(":")[2])
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("127.0.0.1", port))
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.bind(held.endpoints.live)
    held.close()
