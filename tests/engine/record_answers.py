"""Write the bytes of a vLLM server's answers, as they come.

    python -m tests.engine.record_answers URL PID

The server is to run with what the supervisor adds (`--enable-prompt-tokens-details`,
`--enable-force-include-usage`). PID is its process group, which is stopped by SIGTERM in the end,
and the answers that this breaks off are recorded too. Tests feed the files to the parsers, in every
split.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.bodies import CHAT, COMPLETIONS, chat, completion
from tests.raw_http import Answer, RawClient, exchange

FOLDER = Path(__file__).resolve().parent.parent / "unit" / "upstream" / "recorded"
SECONDS = 60


class Recorder(RawClient):
    """Keeps every byte that comes."""

    def __init__(self, url: str) -> None:
        super().__init__(url, SECONDS)
        self.received = b""

    def _fill(self) -> None:
        before = len(self._buffer)
        super()._fill()
        self.received += self._buffer[before:]


def requests(model: str) -> dict[str, tuple[str, dict[str, Any] | None]]:
    """(path, body) by the name of the file."""
    asked = {"include_usage": True}
    common: dict[str, Any] = {"model": model, "temperature": 0}
    hello: dict[str, Any] = {"text": "Say hello to the wörld. 🙂", **common}
    return {
        "models": ("/v1/models", None),
        "health": ("/health", None),
        "chat": (CHAT, chat(**hello)),
        "chat_logprobs": (CHAT, chat(**hello, logprobs=True, top_logprobs=2)),
        "chat_stream": (CHAT, chat(**hello, stream=True)),
        "chat_stream_usage": (CHAT, chat(**hello, stream=True, stream_options=asked)),
        "chat_stream_two": (CHAT, chat(**hello, n=2, seed=1, stream=True) | {"temperature": 1}),
        "completion": (COMPLETIONS, completion(**common, return_token_ids=True)),
        "completion_stream": (COMPLETIONS, completion(**common, stream=True)),
        "error_400": (CHAT, chat(**{**hello, "max_tokens": 10_000_000})),
        "error_400_stream": (CHAT, chat(**{**hello, "max_tokens": 10_000_000}, stream=True)),
        "error_404": (CHAT, chat(model="no such model")),
    }


def write(name: str, client: Recorder, answer: Answer) -> None:
    (FOLDER / f"{name}.http").write_bytes(client.received)
    print(f"{name}: {answer.status}, {len(client.received)} bytes, {answer.end}")


def record_whole(url: str, model: str) -> None:
    for name, (path, body) in requests(model).items():
        with Recorder(url) as client:
            raw = None if body is None else json.dumps(body).encode()
            client.send("GET" if raw is None else "POST", path, raw)
            write(name, client, client.read())


def record_stopped(url: str, model: str, pid: int) -> None:
    """A plain and a streamed answer that SIGTERM breaks off after a few tokens."""
    body = chat(model=model, max_tokens=1000, ignore_eos=True)
    with Recorder(url) as plain, Recorder(url) as streamed:
        plain.send("POST", CHAT, json.dumps(body).encode())
        streamed.send("POST", CHAT, json.dumps({**body, "stream": True}).encode())
        answer = streamed.read_head()
        streamed.read_events(answer, 3)
        os.killpg(pid, signal.SIGTERM)
        for _ in streamed.read_pieces(answer):
            pass
        write("stopped_stream", streamed, answer)
        write("stopped", plain, plain.read())


def main(url: str, pid: int) -> None:
    model = exchange(url, "/v1/models", seconds=SECONDS).json()["data"][0]["id"]
    FOLDER.mkdir(exist_ok=True)
    record_whole(url, model)
    record_stopped(url, model, pid)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
