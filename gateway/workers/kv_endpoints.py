"""Where a worker's engine tells what it caches: as the operator says, or on loopback ports."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from gateway.workers.ports import LOOPBACK, HeldPort

_GIVEN = re.compile(r"tcp://(?P<host>\[[^\]]+\]|[^:/+\[\]]+):(?P<port>\d+)(\+(?P<replay>\d+))?")


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """Where one start of a worker publishes. ``bound``: the worker connects to ``live``, at which
    we listen; else it listens there. It always listens at ``replay``."""

    live: str
    replay: str | None = None
    bound: bool = False


def parse_endpoints(text: str) -> EventEndpoints | None:
    """`tcp://HOST:PORT`, with `+PORT` behind it where the same host replays; `none` for none.

    Raises ValueError.
    """
    if text == "none":
        return None
    match = _GIVEN.fullmatch(text)
    if match is None or any(not 0 < int(port) < 65536 for port in _ports(match)):
        raise ValueError(f"{text!r} is not tcp://HOST:PORT, tcp://HOST:PORT+REPLAY_PORT or none")
    host = f"tcp://{match['host']}"
    replay = match["replay"]
    return EventEndpoints(f"{host}:{match['port']}", replay and f"{host}:{replay}")


def _ports(match: re.Match[str]) -> list[str]:
    return [port for port in (match["port"], match["replay"]) if port is not None]


class HeldEndpoints:
    """Two loopback ports for one start of a worker. vLLM connects to the first, since it would
    listen only on all addresses, and what it tells are prompts."""

    def __init__(self) -> None:
        self._live, self._replay = HeldPort(), HeldPort()
        self.endpoints = EventEndpoints(
            f"tcp://{LOOPBACK}:{self._live.number}",
            f"tcp://{LOOPBACK}:{self._replay.number}",
            bound=True,
        )

    def arguments(self) -> list[str]:
        """vLLM's."""
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoints.live,
            "replay_endpoint": self.endpoints.replay,
        }
        return ["--kv-events-config", json.dumps(config)]

    def close(self) -> None:
        self._live.close()
        self._replay.close()
