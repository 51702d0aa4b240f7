"""A worker that costs next to nothing: vLLM's paths and canned answers on httptools.

    python -m tests.bench.stub_worker [--chunks 64] [--gap-seconds 0.01] ...

It takes a free loopback port and prints it. A POST with "stream": true gets events that each carry
the CLOCK_MONOTONIC time they were due at; any other POST one completion, or `--plain-bytes` of
filling that go out as fast as they are read. GET /sent tells how many events have been sent. With
`--model-folder` it serves that model's `/tokenize`, so that prompts are read as exact tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import httptools
import uvloop

from gateway.prompt.chat_template import TemplateFailed
from gateway.prompt.conversation import NotExact, read_conversation
from gateway.prompt.tokenizer import ModelTokenizer, load_tokenizer

DUE_MARK = b'"due_ns":"'
DUE_DIGITS = 20
SECOND_NS = 1_000_000_000
COMPLETION = json.dumps(
    {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Twelve rooms and three doors. " * 8},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 40,
            "total_tokens": 56,
            "completion_tokens": 16,
            "prompt_tokens_details": {"cached_tokens": 32},
        },
    }
).encode()
MODELS = b'{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"vllm"}]}'
METRICS = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="20000",engine="0"} 1.0
"""
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
FILLING = memoryview(b" " * 65536)


def _head(length: int, kind: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    line = b"HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
    return line % (status, kind, length)


def _whole(body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    return _head(len(body), kind, status) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n" % len(data) + data + b"\r\n"


# A chunk as vLLM writes it plus the time; fixed digits, so that its size line is fixed as well.
_SHAPE = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1,'
    b'"model":"m","choices":[{"index":0,"delta":{"content":" room"},"logprobs":null,'
    b'"finish_reason":null}],' + DUE_MARK + b'%s"}\n\n'
)
EVENT = _chunk(_SHAPE % (b"0" * DUE_DIGITS)).replace(b"0" * DUE_DIGITS, b"%%0%dd" % DUE_DIGITS)
LAST = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
PLAIN = _whole(COMPLETION)
NOT_FOUND = _whole(b"{}", status=b"404 Not Found")
FIXED = {
    b"/health": _whole(b""),
    b"/v1/models": _whole(MODELS),
    b"/metrics": _whole(METRICS, b"text/plain; version=0.0.4"),
}


@dataclass
class Stub:
    """What all connections of this worker share: how it answers, and how many events are out."""

    chunks: int
    gap_ns: int
    first_seconds: float  # from a streamed request to its first event; its head goes out at once
    plain_seconds: float  # from a plain request to its answer
    plain_bytes: int  # 0: a completion
    model_folder: Path | None = None
    sent: int = 0

    def __post_init__(self) -> None:
        self.fixed = dict(FIXED)
        self._model: ModelTokenizer | None = None
        if self.model_folder is not None:
            self._model = load_tokenizer(self.model_folder, None)
            root = b'"root":"%s","owned_by"' % str(self.model_folder.resolve()).encode()
            self.fixed[b"/v1/models"] = _whole(MODELS.replace(b'"owned_by"', root))

    def tokenize(self, body: bytes) -> bytes:
        """What vLLM answers; 404 without a model, 400 where its template refuses."""
        fields = json.loads(body)
        if self._model is None:
            return NOT_FOUND
        if "prompt" in fields:
            ids = self._model.encode(fields["prompt"], fields.get("add_special_tokens", True))
            return _whole(json.dumps({"tokens": ids, "count": len(ids)}).encode())
        try:
            conversation = read_conversation(fields, False)
            ids = self._model.encode(self._model.render(conversation), conversation.special)
        except (TemplateFailed, NotExact):
            return _whole(b"{}", status=b"400 Bad Request")
        return _whole(json.dumps({"tokens": ids, "count": len(ids)}).encode())


class Connection(asyncio.Protocol):
    """One request after the other; a timer is all that runs between two events."""

    def __init__(self, stub: Stub, loop: asyncio.AbstractEventLoop) -> None:
        self._stub = stub
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._path = b""
        self._body = b""
        self._events_left = 0
        self._filling_left = 0
        self._due_ns = 0
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # some gateways try HTTP/2 first
            self._transport.close()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._fill()

    def on_message_begin(self) -> None:
        self._path = self._body = b""

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        path = self._path.partition(b"?")[0]
        if path == b"/sent":
            self._transport.write(_whole(b"%d" % self._stub.sent))
        elif self._parser.get_method() == b"GET":
            self._transport.write(self._stub.fixed.get(path, NOT_FOUND))
        elif path == b"/tokenize":
            self._transport.write(self._stub.tokenize(self._body))
        elif path not in (b"/v1/chat/completions", b"/v1/completions"):
            self._transport.write(NOT_FOUND)
        elif b'"stream":true' in self._body or b'"stream": true' in self._body:
            self._transport.write(STREAM_HEAD)
            self._events_left = self._stub.chunks
            self._due_ns = time.monotonic_ns() + int(self._stub.first_seconds * SECOND_NS)
            self._wait() if self._stub.first_seconds else self._event()
        elif self._stub.plain_seconds:
            self._timer = self._loop.call_later(self._stub.plain_seconds, self._plain)
        else:
            self._plain()

    def _event(self) -> None:
        self._transport.write(EVENT % self._due_ns)
        self._stub.sent += 1
        self._events_left -= 1
        if self._events_left:
            self._due_ns += self._stub.gap_ns
            self._wait()
        else:
            self._transport.write(LAST)

    def _wait(self) -> None:
        seconds = (self._due_ns - time.monotonic_ns()) / SECOND_NS
        self._timer = self._loop.call_later(seconds, self._event)

    def _plain(self) -> None:
        if self._stub.plain_bytes:
            self._filling_left = self._stub.plain_bytes
            self._transport.write(_head(self._filling_left))
            self._fill()
        else:
            self._transport.write(PLAIN)

    def _fill(self) -> None:
        while self._filling_left and not self._paused:
            piece = FILLING[: self._filling_left]
            self._filling_left -= len(piece)
            self._transport.write(piece)


async def serve(stub: Stub) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(stub, loop), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--gap-seconds", type=float, default=0.01)
    parser.add_argument("--first-seconds", type=float, default=0)
    parser.add_argument("--plain-seconds", type=float, default=0)
    parser.add_argument("--plain-bytes", type=int, default=0)
    parser.add_argument("--model-folder", type=Path)
    asked = vars(parser.parse_args())
    gap_ns = int(asked.pop("gap_seconds") * SECOND_NS)
    uvloop.run(serve(Stub(gap_ns=gap_ns, **asked)))


if __name__ == "__main__":
    main()
