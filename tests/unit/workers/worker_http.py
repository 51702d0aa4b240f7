"""A vLLM server's control plane, as far as the gateway asks it; each answer can be changed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.unit.loopback import Peer

SERVER_INFO = "/server_info?config_format=json"

MODELS = {
    "object": "list",
    "data": [{"id": "org/model", "object": "model", "max_model_len": 4096, "root": "/m"}],
}


def metrics(process_start: float = 100.0, block_size: int = 32, blocks: int = 500) -> str:
    return (
        f"process_start_time_seconds {process_start}\n"
        f'vllm:cache_config_info{{block_size="{block_size}",num_gpu_blocks="{blocks}"}} 1.0\n'
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
    )


@dataclass
class WorkerHttp:
    """`answers`: status and body by path; a path that is not there answers 404."""

    answers: dict[str, tuple[int, Any]] = field(
        default_factory=lambda: {
            "/health": (200, ""),
            "/v1/models": (200, MODELS),
            "/metrics": (200, metrics()),
        }
    )
    asked: list[tuple[str, bytes]] = field(default_factory=list)
    connections: int = 0

    async def __call__(self, peer: Peer) -> None:
        self.connections += 1
        try:
            await self._answer(peer)
        finally:
            self.connections -= 1

    async def _answer(self, peer: Peer) -> None:
        while True:
            head, _, body = (await peer.request()).partition(b"\r\n\r\n")
            path = head.split(b" ")[1].decode()
            self.asked.append((path, body))
            status, said = self.answers.get(path, (404, ""))
            data = said.encode() if isinstance(said, str) else json.dumps(said).encode()
            await peer.say(
                b"HTTP/1.1 %d Status\r\ncontent-length: %d\r\n\r\n" % (status, len(data)) + data
            )

    def count(self, path: str) -> int:
        return sum(asked == path for asked, _ in self.asked)
